package penstock.spark;

import java.io.IOException;
import java.io.OutputStream;
import java.nio.file.Files;
import java.nio.file.StandardOpenOption;
import org.apache.hadoop.fs.Path;

/**
 * A file on its way into a folder that this process sees. Hadoop's own file system would start a
 * process for its permissions and write its sum into a second file: for a small file most of the time.
 *
 * <p>It is written under its own name, which nobody else has and which nobody reads before a manifest
 * names it. Whoever writes the manifest sees to it that it is on the disk.
 */
final class FileOutput extends Output {
    private final java.nio.file.Path file;
    private OutputStream opened;

    FileOutput(Path path) {
        super(path, path.toUri().getPath());
        file = java.nio.file.Path.of(path.toUri().getPath());
    }

    @Override
    void part(byte[] body, int length) throws IOException {
        if (opened == null) {
            Files.createDirectories(file.getParent());
            opened =
                    Files.newOutputStream(
                            file, StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE);
        }
        opened.write(body, 0, length);
    }

    @Override
    void end(byte[] tail, int length) throws IOException {
        part(tail, length);
        opened.close();
    }

    @Override
    void remove() throws IOException {
        if (opened != null) {
            opened.close();
            Files.deleteIfExists(file);
        }
    }
}
