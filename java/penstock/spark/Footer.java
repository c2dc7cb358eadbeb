package penstock.spark;

import java.util.Arrays;

/**
 * The footer of a Parquet file, walked as far as it takes to know how many rows there are, and to put
 * the encodings of each column in order, in place: Spark's writer keeps them in a set whose order is
 * that of addresses, and equal rows should be equal bytes. A footer is a Thrift struct in the compact
 * protocol. {@code access/footers.py} does the same for files of a folder.
 */
final class Footer {
    private static final int MAGIC = 0x31524150;
    private static final int[] ROWS = {3};
    private static final int[] ENCODINGS = {4, 1, 3, 2};
    private final byte[] body;
    private final int stop;
    private int at;
    private long rows = -1;

    private Footer(byte[] body, int start, int stop) {
        this.body = body;
        this.at = start;
        this.stop = stop;
    }

    /** Settle the footer at the end of these bytes; how many rows it has, -1 if it is not there. */
    static long settle(byte[] tail, int length) {
        int all = length(tail, length);
        if (all == 0) {
            return -1;
        }
        Footer footer = new Footer(tail, length - all, length - 8);
        footer.struct(new int[0]);
        return footer.rows;
    }

    /** How many of these bytes are the footer, with its length and the mark; 0 if it is not there. */
    static int length(byte[] tail, int length) {
        if (length < 8 || number(tail, length - 4) != MAGIC) {
            return 0;
        }
        int found = number(tail, length - 8);
        return found < 0 || found > length - 8 ? 0 : found + 8;
    }

    private static int number(byte[] bytes, int at) {
        return (bytes[at] & 255) | (bytes[at + 1] & 255) << 8 | (bytes[at + 2] & 255) << 16
                | (bytes[at + 3] & 255) << 24;
    }

    private void struct(int[] path) {
        int field = 0;
        for (int head = next(); head != 0; head = next()) {
            field = head >> 4 == 0 ? (int) signed(varint()) : field + (head >> 4);
            int[] inner = Arrays.copyOf(path, path.length + 1);
            inner[path.length] = field;
            value(head & 15, inner);
        }
    }

    private void value(int kind, int[] path) {
        switch (kind) {
            case 1, 2 -> {} // true or false stand in the head of a field
            case 3 -> at += 1;
            case 4, 5, 6 -> {
                long found = varint();
                if (Arrays.equals(path, ROWS)) {
                    rows = signed(found);
                }
            }
            case 7 -> at += 8;
            case 8 -> {
                long length = varint();
                at += (int) length;
            }
            case 9, 10 -> list(path);
            case 11 -> map(path);
            case 12 -> struct(path);
            default -> throw new IllegalStateException("a footer with the type " + kind);
        }
    }

    private void list(int[] path) {
        int head = next();
        int count = head >> 4 == 15 ? (int) varint() : head >> 4;
        int start = at;
        for (int each = 0; each < count; each++) {
            item(head & 15, path);
        }
        if (Arrays.equals(path, ENCODINGS) && at - start == count) {
            Arrays.sort(body, start, at);
        }
    }

    private void map(int[] path) {
        int count = (int) varint();
        int kinds = count == 0 ? 0 : next();
        for (int each = 0; each < count; each++) {
            item(kinds >> 4, path);
            item(kinds & 15, path);
        }
    }

    /** A value outside of a field, where being true or false takes a byte. */
    private void item(int kind, int[] path) {
        value(kind == 1 || kind == 2 ? 3 : kind, path);
    }

    private int next() {
        if (at >= stop) {
            throw new IllegalStateException("a footer without an end");
        }
        return body[at++] & 255;
    }

    private long varint() {
        long found = 0;
        for (int shift = 0; ; shift += 7) {
            int each = next();
            found |= (long) (each & 127) << shift;
            if (each < 128) {
                return found;
            }
        }
    }

    private static long signed(long number) {
        return number >>> 1 ^ -(number & 1);
    }
}
