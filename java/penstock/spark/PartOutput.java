package penstock.spark;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.Semaphore;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.hadoop.fs.Path;

/**
 * A file on its way into a bucket: a small one is one request, which the commit of its task waits for;
 * a larger one is sent in parts while it is written. A process that is killed leaves a whole file that
 * no manifest names, or parts that no list shows. Memory: at most {@link #PENDING_MAX} parts and two
 * more for each file that is open, and small files that {@link #ROOM} has room for.
 */
final class PartOutput extends Output {
    private static final int PENDING_MAX = 2;
    private static final int PARTS_MAX = 10_000;
    private static final int SMALL = 1 << 20;
    private static final Semaphore ROOM = new Semaphore(32);
    private static final Pattern UPLOAD = Pattern.compile("<UploadId>([^<]+)</UploadId>");

    private final Bucket bucket;
    private final String key;
    private final List<String> etags = new ArrayList<>();
    private final Deque<Future<String>> pending = new ArrayDeque<>();
    private int parts;
    private String upload = "";

    PartOutput(Path path) {
        super(path, "s3://" + Buckets.name(path));
        bucket = Bucket.of(Buckets.bucket(path));
        key = Buckets.key(path);
    }

    @Override
    void remove() throws IOException {
        // What arrives after it was removed would stay, and be paid for.
        for (Future<String> each : pending) {
            try {
                each.get();
            } catch (InterruptedException error) {
                throw Buckets.interrupted(error);
            } catch (ExecutionException error) {
                continue; // It is not there, or goes with the others.
            }
        }
        if (upload.isEmpty() || isSent()) {
            // Also what was perhaps sent, by a request whose answer was lost.
            bucket.delete(key);
            return;
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
    void part(byte[] body, int length) throws IOException {
        if (upload.isEmpty()) {
            Bucket.Answer begun =
                    bucket.send(new Bucket.Ask("POST", key, Map.of("uploads", ""), Map.of()));
            bucket.expect(begun, key, 200);
            Matcher found = UPLOAD.matcher(new String(begun.body(), StandardCharsets.UTF_8));
            if (!found.find()) {
                throw new IOException(name + " could not be begun.");
            }
            upload = found.group(1);
        }
        if (++parts > PARTS_MAX) {
            throw new IOException(name + " is too large: cut it into smaller files.");
        }
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
    void end(byte[] tail, int length) throws IOException {
        if (!upload.isEmpty()) {
            part(tail, length);
            complete();
        } else if (length > SMALL) {
            bucket.put(key, tail, length);
        } else {
            aside(tail, length);
        }
    }

    /** Send it beside what the task writes next: one that is divided may write thousands. */
    private void aside(byte[] tail, int length) throws IOException {
        try {
            ROOM.acquire();
        } catch (InterruptedException error) {
            throw Buckets.interrupted(error);
        }
        pending.add(
                Bucket.aside(() -> {
                    try {
                        bucket.put(key, tail, length);
                    } finally {
                        ROOM.release();
                    }
                    return "";
                }));
    }

    @Override
    void settled() throws IOException {
        while (!pending.isEmpty()) {
            settle();
        }
    }

    private void complete() throws IOException {
        settled();
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
            if (there.header("content-range").endsWith("/" + size())) {
                return;
            }
        }
        bucket.expect(answer, key, 200);
        if (!answer.code().isEmpty()) {
            // A server that began to answer before it was done has only its body left to say so.
            throw new IOException(name + " could not be completed: " + answer.code() + ".");
        }
    }
}
