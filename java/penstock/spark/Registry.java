package penstock.spark;

import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.Path;

/**
 * What the driver knows, told by Penstock's worker through its own gateway: how buckets are reached,
 * which files a plan reads, with their sizes and sums, and what writes have committed.
 *
 * <p>It is in the memory of the driver only: in no setting, plan, file or argument. Executors ask for
 * single entries by Spark's own RPC ({@link Plugin}).
 */
public final class Registry {
    /** Where the files of a plan are listed; no bucket has such a name. */
    static final String READS = "_reads";

    private static final Map<String, Reach> REACHES = new ConcurrentHashMap<>();
    private static final Map<String, Known> FILES = new ConcurrentHashMap<>();
    private static final Map<String, FileStatus[]> LISTS = new ConcurrentHashMap<>();
    private static final Map<String, String> COMMITTED = new ConcurrentHashMap<>();

    private Registry() {}

    /** A file: its size, its SHA-256 or an empty text, and how many plans read it. */
    record Known(long size, String sha256, int readers) {
        String text() {
            return size + " " + sha256;
        }

        static Known of(String text) {
            int cut = text.indexOf(' ');
            return new Known(Long.parseLong(text.substring(0, cut)), text.substring(cut + 1), 0);
        }
    }

    /** How a bucket is reached from now on. Keys that are renewed are told again. */
    public static void reach(
            String bucket,
            String endpoint,
            String root,
            String region,
            String authorities,
            String accessKey,
            String secretKey,
            String token) {
        REACHES.put(
                bucket, new Reach(endpoint, root, region, authorities, accessKey, secretKey, token));
    }

    /** Make a list of files, a line each: {@code SIZE SHA256 BUCKET/KEY}, without sum {@code -}. */
    public static String list(String name, String lines) {
        FileStatus[] found =
                lines.lines().map(Registry::entry).toArray(FileStatus[]::new);
        LISTS.put(name, found);
        return Buckets.SCHEME + "://" + READS + "/" + name;
    }

    private static FileStatus entry(String line) {
        String[] parts = line.split(" ", 3);
        long size = Long.parseLong(parts[0]);
        String sha256 = parts[1].equals("-") ? "" : parts[1];
        FILES.merge(
                parts[2],
                new Known(size, sha256, 1),
                (old, now) -> new Known(size, sha256, old.readers() + 1));
        return Buckets.status(size, new Path(Buckets.SCHEME + "://" + parts[2]));
    }

    /** Forget a list, and the files that no other list has. */
    public static void forget(String name) {
        FileStatus[] found = LISTS.remove(name);
        for (FileStatus each : found == null ? new FileStatus[0] : found) {
            FILES.computeIfPresent(
                    Buckets.name(each.getPath()),
                    (path, known) ->
                            known.readers() == 1
                                    ? null
                                    : new Known(known.size(), known.sha256(), known.readers() - 1));
        }
    }

    /** What a write has committed, once: a line a file; null if it has not. */
    public static String committed(String path) {
        return COMMITTED.remove(path);
    }

    static void commit(String path, List<String> lines) {
        COMMITTED.put(path, String.join("\n", lines));
    }

    static FileStatus[] listed(String name) {
        FileStatus[] found = LISTS.get(name);
        return found == null ? null : Arrays.copyOf(found, found.length);
    }

    static Reach reachOf(String bucket) {
        return REACHES.get(bucket);
    }

    static Known known(String path) {
        return FILES.get(path);
    }
}
