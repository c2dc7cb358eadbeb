package penstock.spark;

import java.io.IOException;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.Deque;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.hadoop.fs.Path;

/**
 * A Parquet file on its way into a bucket: sent in parts while it is written, with its SHA-256 taken
 * on the way. The last part or two are held back until it is closed, because the footer in them is
 * settled first ({@link Footer}).
 *
 * <p>States: open, closed, gone. Closed, it is there whole and waits for the commit of its task to
 * {@link #take} what is known of it; a file without rows is not sent. {@link #drop} removes it in
 * any state. A process that is killed leaves a whole file that no manifest names, or parts that no
 * list shows. Memory: at most {@link #PENDING_MAX} parts and two more for each file that is open.
 */
final class PartOutput extends OutputStream {
    private static final int PENDING_MAX = 2;
    private static final int PARTS_MAX = 10_000;
    private static final int FIRST = 64 << 10;
    private static final int FOOTER_MAX = 16 << 10;
    private static final Pattern UPLOAD = Pattern.compile("<UploadId>([^<]+)</UploadId>");
    private static final Map<String, PartOutput> LIVE = new ConcurrentHashMap<>();

    private final Bucket bucket;
    private final String key;
    private final String name;
    private final MessageDigest digest = Reach.sha256();
    private final List<String> etags = new ArrayList<>();
    private final Deque<Future<String>> pending = new ArrayDeque<>();
    private byte[] held;
    private byte[] current = new byte[FIRST];
    private int filled;
    private long bytes;
    private long rows = -1;
    private String footer = "-";
    private int parts;
    private String upload = "";
    private boolean isClosed;
    private boolean isWhole;
    private boolean isSent;

    PartOutput(Path path) {
        bucket = Bucket.of(Buckets.bucket(path));
        key = Buckets.key(path);
        name = Buckets.name(path);
        LIVE.put(name, this);
    }

    /**
     * What a closed file is: {@code ROWS BYTES SHA256 FOOTER}; empty if it has no rows. The footer is in
     * Base64, for the bounds of columns; {@code -} if it is large.
     */
    static String take(Path path) throws IOException {
        PartOutput found = LIVE.remove(Buckets.name(path));
        if (found == null || !found.isWhole) {
            throw new IOException("s3://" + Buckets.name(path) + " was never written to its end.");
        }
        String sum = HexFormat.of().formatHex(found.digest.digest());
        return found.isSent
                ? found.rows + " " + found.bytes + " " + sum + " " + found.footer
                : "";
    }

    /** Remove a file, whatever has become of it. */
    static void drop(Path path) throws IOException {
        PartOutput found = LIVE.remove(Buckets.name(path));
        if (found == null) {
            return;
        }
        found.isClosed = true;
        // A task that is killed is interrupted, and no request would be sent.
        boolean isInterrupted = Thread.interrupted();
        try {
            found.remove();
        } finally {
            if (isInterrupted) {
                Thread.currentThread().interrupt();
            }
        }
    }

    private void remove() throws IOException {
        if (upload.isEmpty() || isSent) {
            // Also what was perhaps sent, by a request whose answer was lost.
            bucket.delete(key);
            return;
        }
        // A part that arrives after the upload was ended would stay, and be paid for.
        for (Future<String> each : pending) {
            try {
                each.get();
            } catch (InterruptedException error) {
                throw Buckets.interrupted(error);
            } catch (ExecutionException error) {
                continue; // It is not there, or goes with the others.
            }
        }
        Bucket.Answer ended =
                bucket.send(new Bucket.Ask("DELETE", key, Map.of("uploadId", upload), Map.of()));
        if (ended.status() == 404) {
            bucket.delete(key); // It was completed, by a request whose answer was lost.
        } else {
            bucket.expect(ended, key, 200, 204);
        }
    }

    @Override
    public void write(int one) throws IOException {
        write(new byte[] {(byte) one}, 0, 1);
    }

    @Override
    public void write(byte[] from, int offset, int length) throws IOException {
        if (isClosed) {
            throw new IOException("s3://" + name + " is closed.");
        }
        for (int done = 0; done < length; ) {
            if (filled == current.length) {
                room();
            }
            int count = Math.min(length - done, current.length - filled);
            System.arraycopy(from, offset + done, current, filled, count);
            filled += count;
            done += count;
        }
        bytes += length;
    }

    private void room() throws IOException {
        if (current.length < Bucket.CHUNK) {
            current = Arrays.copyOf(current, current.length * 2);
            return;
        }
        if (held != null) {
            part(held, held.length);
        }
        held = current;
        current = new byte[Bucket.CHUNK];
        filled = 0;
    }

    private void part(byte[] body, int length) throws IOException {
        if (upload.isEmpty()) {
            Bucket.Answer begun =
                    bucket.send(new Bucket.Ask("POST", key, Map.of("uploads", ""), Map.of()));
            bucket.expect(begun, key, 200);
            Matcher found = UPLOAD.matcher(new String(begun.body(), StandardCharsets.UTF_8));
            if (!found.find()) {
                throw new IOException("s3://" + name + " could not be begun.");
            }
            upload = found.group(1);
        }
        if (++parts > PARTS_MAX) {
            throw new IOException("s3://" + name + " is too large: cut it into smaller files.");
        }
        digest.update(body, 0, length);
        while (pending.size() >= PENDING_MAX) {
            settle();
        }
        Map<String, String> query =
                Map.of("partNumber", String.valueOf(parts), "uploadId", upload);
        pending.add(
                Bucket.aside(() -> {
                    Bucket.Answer answer =
                            bucket.send(
                                    new Bucket.Ask("PUT", key, query, Map.of(), body, length));
                    bucket.expect(answer, key, 200);
                    return answer.header("etag");
                }));
    }

    private void settle() throws IOException {
        try {
            etags.add(pending.element().get());
            pending.remove();
        } catch (InterruptedException error) {
            throw Buckets.interrupted(error);
        } catch (ExecutionException error) {
            throw new IOException(error.getCause().getMessage(), error.getCause());
        }
    }

    @Override
    public void close() throws IOException {
        if (isClosed) {
            return;
        }
        isClosed = true;
        byte[] tail = current;
        int length = filled;
        if (held != null) {
            tail = Arrays.copyOf(held, held.length + filled);
            System.arraycopy(current, 0, tail, held.length, filled);
            length = tail.length;
        }
        held = null;
        current = new byte[0];
        rows = Footer.settle(tail, length);
        int footed = Footer.length(tail, length);
        if (footed > 0 && footed <= FOOTER_MAX) {
            byte[] last = Arrays.copyOfRange(tail, length - footed, length);
            footer = Base64.getEncoder().encodeToString(last);
        }
        if (!upload.isEmpty()) {
            part(tail, length);
            complete();
            isSent = true;
        } else if (rows != 0) {
            digest.update(tail, 0, length);
            bucket.put(key, tail, length);
            isSent = true;
        }
        isWhole = true;
    }

    private void complete() throws IOException {
        while (!pending.isEmpty()) {
            settle();
        }
        StringBuilder said = new StringBuilder("<CompleteMultipartUpload>");
        for (int number = 1; number <= etags.size(); number++) {
            said.append("<Part><PartNumber>").append(number).append("</PartNumber><ETag>")
                    .append(etags.get(number - 1).replace("\"", "&quot;"))
                    .append("</ETag></Part>");
        }
        byte[] body =
                said.append("</CompleteMultipartUpload>").toString().getBytes(StandardCharsets.UTF_8);
        Bucket.Answer answer =
                bucket.send(
                        new Bucket.Ask(
                                "POST", key, Map.of("uploadId", upload), Map.of(), body,
                                body.length));
        if (answer.status() == 404) {
            // An answer that was lost: it was completed the first time.
            Bucket.Answer there = bucket.range(key, "bytes=-1", "");
            if (there.header("content-range").endsWith("/" + bytes)) {
                return;
            }
        }
        bucket.expect(answer, key, 200);
        if (!answer.code().isEmpty()) {
            // A server that began to answer before it was done has only its body left to say so.
            throw new IOException("s3://" + name + " could not be completed: " + answer.code() + ".");
        }
    }
}
