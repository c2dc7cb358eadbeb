package penstock.spark;

import java.io.EOFException;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.function.IntFunction;
import org.apache.hadoop.fs.FSInputStream;
import org.apache.hadoop.fs.FileRange;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.StreamCapabilities;

/**
 * An object that is read in ranges, as Parquet is: its end first, then what a query needs.
 *
 * <p>What is verified: a file of up to {@link #WHOLE} is fetched whole and compared with the SHA-256
 * of its manifest; of a larger one the size is, and every later range has to be of the same object
 * (its ETag). What was fetched of the ends of files is kept for a moment, because Spark opens a file
 * more than once. Ranges that lie near each other are one request, and requests run side by side.
 */
final class RangeInput extends FSInputStream implements StreamCapabilities {
    private static final int WHOLE = 1 << 20;
    private static final int TAIL = 128 << 10;
    private static final int AHEAD = 64 << 10;
    private static final int GAP = 128 << 10;
    private static final int ENDS_MAX = 32;
    private static final Map<String, End> ENDS =
            new LinkedHashMap<>(ENDS_MAX, 0.75f, true) {
                private static final long serialVersionUID = 1;

                @Override
                protected boolean removeEldestEntry(Map.Entry<String, End> eldest) {
                    return size() > ENDS_MAX;
                }
            };

    private final Bucket bucket;
    private final String key;
    private final String name;
    private final End end;
    private long at;
    private long blockAt;
    private byte[] block = new byte[0];

    /** The last bytes of an object, from {@code start}. */
    private record End(long size, String etag, long start, byte[] bytes) {}

    RangeInput(Path path) throws IOException {
        bucket = Bucket.of(Buckets.bucket(path));
        key = Buckets.key(path);
        name = Buckets.name(path);
        end = end(path);
        if (end.start() + end.bytes().length != end.size()) {
            throw new Damaged(name, "it is shorter than it says.");
        }
    }

    /** How large a file is: known of the files of plans, and asked of the bucket otherwise. */
    static long sizeOf(Path path) throws IOException {
        Registry.Known known = Plugin.known(Buckets.name(path));
        return known == null ? end(path).size() : known.size();
    }

    private static End end(Path path) throws IOException {
        String name = Buckets.name(path);
        Registry.Known known = Plugin.known(name);
        String kind = known == null ? name : known.text() + " " + name;
        synchronized (ENDS) {
            End kept = ENDS.get(kind);
            if (kept != null) {
                return kept;
            }
        }
        End found = fetched(path, name, known);
        synchronized (ENDS) {
            ENDS.put(kind, found);
        }
        return found;
    }

    private static End fetched(Path path, String name, Registry.Known known) throws IOException {
        int wanted = known != null && known.size() <= WHOLE ? WHOLE : TAIL;
        Bucket bucket = Bucket.of(Buckets.bucket(path));
        Bucket.Answer answer = bucket.range(Buckets.key(path), "bytes=-" + wanted, "");
        bucket.expect(answer, Buckets.key(path), 206, 200, 416);
        byte[] bytes = answer.status() == 416 ? new byte[0] : answer.body();
        String said = answer.header("content-range");
        long size =
                answer.status() == 206
                        ? Long.parseLong(said.substring(said.lastIndexOf('/') + 1))
                        : bytes.length;
        if (known != null && known.size() != size) {
            throw new Damaged(
                    name, "it has " + size + " bytes, and should have " + known.size() + ".");
        }
        if (known != null && size <= WHOLE && !known.sha256().isEmpty()) {
            String sum = Reach.sum(bytes);
            if (!sum.equals(known.sha256())) {
                throw new Damaged(
                        name,
                        "its SHA-256 is " + sum + ", and it should be " + known.sha256() + ".");
            }
        }
        return new End(size, answer.header("etag"), size - bytes.length, bytes);
    }

    @Override
    public void seek(long position) throws IOException {
        if (position < 0 || position > end.size()) {
            throw new EOFException("s3://" + name + " has no byte " + position + ".");
        }
        at = position;
    }

    @Override
    public long getPos() {
        return at;
    }

    @Override
    public boolean seekToNewSource(long position) {
        return false;
    }

    @Override
    public int available() {
        return (int) Math.min(Integer.MAX_VALUE, end.size() - at);
    }

    @Override
    public int read() throws IOException {
        byte[] one = new byte[1];
        return read(one, 0, 1) < 0 ? -1 : one[0] & 0xff;
    }

    @Override
    public int read(byte[] into, int offset, int length) throws IOException {
        if (length == 0) {
            return 0;
        }
        int found = read(at, into, offset, length);
        at += Math.max(0, found);
        return found;
    }

    @Override
    public int read(long position, byte[] into, int offset, int length) throws IOException {
        if (position >= end.size()) {
            return -1;
        }
        byte[] source = end.bytes();
        long start = end.start();
        if (position < start) {
            if (position < blockAt || position >= blockAt + block.length) {
                int wanted = Math.min(Bucket.CHUNK, Math.max(length, AHEAD));
                block = range(position, (int) Math.min(wanted, end.size() - position));
                blockAt = position;
            }
            source = block;
            start = blockAt;
        }
        int from = (int) (position - start);
        int count = Math.min(length, source.length - from);
        System.arraycopy(source, from, into, offset, count);
        return count;
    }

    /** Just these bytes. */
    private byte[] range(long start, int length) throws IOException {
        byte[] found = new byte[length];
        for (int done = 0; done < length; ) {
            int count = Math.min(Bucket.CHUNK, length - done);
            long from = start + done;
            if (from >= end.start() && from + count <= end.size()) {
                System.arraycopy(end.bytes(), (int) (from - end.start()), found, done, count);
            } else {
                String range = "bytes=" + from + "-" + (from + count - 1);
                Bucket.Answer answer = bucket.range(key, range, end.etag());
                bucket.expect(answer, key, 206, 200);
                if (answer.body().length != count) {
                    throw new IOException("s3://" + name + " gave another range than asked for.");
                }
                System.arraycopy(answer.body(), 0, found, done, count);
            }
            done += count;
        }
        return found;
    }

    @Override
    public boolean hasCapability(String capability) {
        return StreamCapabilities.VECTOREDIO.equals(capability);
    }

    @Override
    public void readVectored(List<? extends FileRange> ranges, IntFunction<ByteBuffer> allocate)
            throws IOException {
        List<FileRange> sorted = new ArrayList<>(ranges);
        sorted.sort(Comparator.comparingLong(FileRange::getOffset));
        for (FileRange each : sorted) {
            if (each.getOffset() < 0 || each.getOffset() + each.getLength() > end.size()) {
                throw new EOFException("s3://" + name + " ends before " + each + ".");
            }
            each.setData(new CompletableFuture<>());
        }
        for (int first = 0, next; first < sorted.size(); first = next) {
            long start = sorted.get(first).getOffset();
            long stop = start + sorted.get(first).getLength();
            for (next = first + 1; next < sorted.size(); next++) {
                FileRange each = sorted.get(next);
                long further = Math.max(stop, each.getOffset() + each.getLength());
                if (each.getOffset() - stop > GAP || further - start > Bucket.CHUNK) {
                    break;
                }
                stop = further;
            }
            List<FileRange> group = sorted.subList(first, next);
            int length = (int) (stop - start);
            Bucket.aside(() -> {
                fill(group, start, length, allocate);
                return null;
            });
        }
    }

    private void fill(
            List<FileRange> group, long start, int length, IntFunction<ByteBuffer> allocate) {
        try {
            byte[] bytes = range(start, length);
            for (FileRange each : group) {
                ByteBuffer buffer = allocate.apply(each.getLength());
                buffer.put(bytes, (int) (each.getOffset() - start), each.getLength());
                buffer.flip();
                each.getData().complete(buffer);
            }
        } catch (IOException | RuntimeException | Error error) {
            group.forEach(each -> each.getData().completeExceptionally(error));
        }
    }
}
