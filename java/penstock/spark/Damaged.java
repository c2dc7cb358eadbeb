package penstock.spark;

import java.io.IOException;

/** A file is not what its manifest says: another attempt finds the same. */
public final class Damaged extends IOException {
    private static final long serialVersionUID = 1;

    Damaged(String path, String what) {
        super(
                "The file s3://" + path + " is not what its manifest says: " + what
                        + " Make the partition again: a backfill of it writes new files.");
    }
}
