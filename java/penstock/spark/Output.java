package penstock.spark;

import java.io.IOException;
import java.io.OutputStream;
import java.security.MessageDigest;
import java.util.Arrays;
import java.util.Base64;
import java.util.HexFormat;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.hadoop.fs.Path;

/**
 * A Parquet file on its way to where it belongs, with its SHA-256 taken on the way. The last chunk or
 * two are held back until it is closed, because the footer in them is settled first ({@link Footer}).
 *
 * <p>States: open, closed, gone. Closed, it is there whole and waits for the commit of its task to
 * {@link #take} what is known of it; a file without rows is not written. {@link #drop} removes it in
 * any state. A process that is killed leaves a file that no manifest names.
 */
abstract class Output extends OutputStream {
    private static final int FIRST = 64 << 10;
    private static final int FOOTER_MAX = 16 << 10;
    private static final Map<String, Output> LIVE = new ConcurrentHashMap<>();

    /** Where it will lie, for messages. */
    final String name;

    private final MessageDigest digest = Reach.sha256();
    private byte[] held;
    private byte[] current = new byte[FIRST];
    private int filled;
    private long bytes;
    private long rows = -1;
    private String footer = "-";
    private boolean isBegun;
    private boolean isClosed;
    private boolean isWhole;
    private boolean isSent;

    Output(Path path, String name) {
        this.name = name;
        LIVE.put(path.toString(), this);
    }

    /** Send what comes next; what was handed over is not changed any more. */
    abstract void part(byte[] body, int length) throws IOException;

    /** Send the end of it; it is there whole when that is {@link #settled}. */
    abstract void end(byte[] tail, int length) throws IOException;

    /** Wait for what is still on its way, after {@link #end}. */
    void settled() throws IOException {}

    /** Remove what there is of it; {@link #isSent} tells whether it is whole. */
    abstract void remove() throws IOException;

    /** Wait until a closed file is there whole. */
    static void settle(Path path) throws IOException {
        Output found = LIVE.get(path.toString());
        if (found != null) {
            found.settled();
        }
    }

    /**
     * What a closed file is: {@code ROWS BYTES SHA256 FOOTER}; empty if it has no rows. The footer is in
     * Base64, for the bounds of columns; {@code -} if it is large.
     */
    static String take(Path path) throws IOException {
        Output found = LIVE.remove(path.toString());
        if (found == null || !found.isWhole) {
            throw new IOException(path + " was never written to its end.");
        }
        String sum = HexFormat.of().formatHex(found.digest.digest());
        return found.isSent
                ? found.rows + " " + found.bytes + " " + sum + " " + found.footer
                : "";
    }

    /** How large a file is that was closed and not taken yet; null if it is no such file. */
    static Long sizeOf(Path path) {
        Output found = LIVE.get(path.toString());
        return found == null || !found.isSent ? null : found.bytes;
    }

    /** Remove a file, whatever has become of it. */
    static void drop(Path path) throws IOException {
        Output found = LIVE.remove(path.toString());
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

    boolean isSent() {
        return isSent;
    }

    /** How many bytes were written to it. */
    long size() {
        return bytes;
    }

    @Override
    public void write(int one) throws IOException {
        write(new byte[] {(byte) one}, 0, 1);
    }

    @Override
    public void write(byte[] from, int offset, int length) throws IOException {
        if (isClosed) {
            throw new IOException(name + " is closed.");
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
            isBegun = true;
            digest.update(held, 0, held.length);
            part(held, held.length);
        }
        held = current;
        current = new byte[Bucket.CHUNK];
        filled = 0;
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
        if (isBegun || rows != 0) {
            digest.update(tail, 0, length);
            end(tail, length);
            isSent = true;
        }
        isWhole = true;
    }
}
