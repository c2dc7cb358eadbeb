package penstock.spark;

import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.net.URI;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.hadoop.util.Progressable;

/**
 * Buckets as a file system of Hadoop's, {@code penstock://BUCKET/KEY}, as far as Spark needs one to
 * read files that it is told of and to write files that nobody else writes.
 *
 * <p>{@code penstock://_reads/NAME} is a folder whose files are those of one plan, wherever they lie:
 * Spark lists it in the driver's memory, without a request. Nothing else can be listed, and nothing
 * is renamed: {@link AttemptCommit} needs neither.
 *
 * <p>{@code penstock://_folders/PATH} is a path of this machine, for new files only ({@link FileOutput}).
 */
public final class Buckets extends FileSystem {
    static final String SCHEME = "penstock";
    private static final String FOLDERS = "_folders";
    private static final long BLOCK = 128L << 20;
    private URI uri;

    @Override
    public void initialize(URI name, Configuration conf) throws IOException {
        super.initialize(name, conf);
        setConf(conf);
        uri = URI.create(SCHEME + "://" + name.getRawAuthority());
    }

    @Override
    public String getScheme() {
        return SCHEME;
    }

    @Override
    public URI getUri() {
        return uri;
    }

    /** BUCKET/KEY of a path. */
    static String name(Path path) {
        return path.toUri().getAuthority() + path.toUri().getPath();
    }

    static String bucket(Path path) {
        return path.toUri().getAuthority();
    }

    static String key(Path path) {
        return path.toUri().getPath().substring(1);
    }

    static FileStatus status(long size, Path path) {
        return new FileStatus(size, false, 1, BLOCK, 0, path);
    }

    static InterruptedIOException interrupted(InterruptedException error) {
        Thread.currentThread().interrupt();
        InterruptedIOException made = new InterruptedIOException("The task was interrupted.");
        made.initCause(error);
        return made;
    }

    private boolean isRead(Path path) {
        return Registry.READS.equals(path.toUri().getAuthority());
    }

    @Override
    public FileStatus getFileStatus(Path given) throws IOException {
        Path path = makeQualified(given);
        if (isRead(path)) {
            listed(path);
            return new FileStatus(0, true, 1, BLOCK, 0, path);
        }
        // Spark asks for every file that it has written, which need not be asked of a bucket.
        Long written = Output.sizeOf(path);
        if (written == null && FOLDERS.equals(path.toUri().getAuthority())) {
            throw new FileNotFoundException("There is no file " + path.toUri().getPath() + ".");
        }
        return status(written == null ? RangeInput.sizeOf(path) : written, path);
    }

    @Override
    public FileStatus[] listStatus(Path given) throws IOException {
        Path path = makeQualified(given);
        return isRead(path) ? listed(path) : new FileStatus[] {getFileStatus(path)};
    }

    private static FileStatus[] listed(Path path) throws IOException {
        FileStatus[] found = Registry.listed(key(path));
        if (found == null) {
            throw new FileNotFoundException("The task that reads " + path + " has ended.");
        }
        return found;
    }

    @Override
    public FSDataInputStream open(Path path, int buffer) throws IOException {
        return new FSDataInputStream(new RangeInput(makeQualified(path)));
    }

    @Override
    public FSDataOutputStream create(
            Path path, FsPermission permission, boolean overwrite, int buffer, short replication,
            long block, Progressable progress) throws IOException {
        Path to = makeQualified(path);
        Output made =
                FOLDERS.equals(to.toUri().getAuthority()) ? new FileOutput(to) : new PartOutput(to);
        return new FSDataOutputStream(made, statistics);
    }

    @Override
    public boolean delete(Path given, boolean recursive) throws IOException {
        Path path = makeQualified(given);
        if (recursive) {
            throw new UnsupportedOperationException("Folders of a bucket are not deleted here.");
        }
        Bucket.of(bucket(path)).delete(key(path));
        return true;
    }

    @Override
    public boolean mkdirs(Path path, FsPermission permission) {
        return true;
    }

    @Override
    public boolean rename(Path from, Path to) {
        throw new UnsupportedOperationException("Nothing is renamed in a bucket.");
    }

    @Override
    public FSDataOutputStream append(Path path, int buffer, Progressable progress) {
        throw new UnsupportedOperationException("Nothing is appended to in a bucket.");
    }

    @Override
    public void setWorkingDirectory(Path path) {}

    @Override
    public Path getWorkingDirectory() {
        return new Path(uri + "/");
    }
}
