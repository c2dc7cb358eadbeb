package penstock.spark;

import java.io.IOException;
import java.io.Serializable;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.regex.Pattern;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.mapreduce.JobContext;
import org.apache.hadoop.mapreduce.TaskAttemptContext;
import org.apache.spark.TaskContext;
import org.apache.spark.internal.io.FileCommitProtocol;
import org.apache.spark.internal.io.FileNameSpec;
import scala.Option;
import scala.jdk.javaapi.CollectionConverters;

/**
 * How a write into an attempt's folder is committed: nothing is moved. Each Spark task writes under
 * names that no other attempt of it has, and its commit message, which reaches the driver with the
 * task's success and only then, names its files with rows, bytes and SHA-256. Of two attempts that
 * both succeed, Spark takes the message of one. What no message names does not count: it is removed
 * by the attempt that gives up, and swept if that was killed or not needed.
 *
 * <p>Where Spark partitions by a column, it names a folder {@code COLUMN=VALUE}, escaped as Hive has
 * it. The folder that is made is {@link #part} of the value instead; the message has both.
 */
public final class AttemptCommit extends FileCommitProtocol implements Serializable {
    private static final long serialVersionUID = 1;
    private static final Pattern ESCAPED = Pattern.compile("%([0-9A-Fa-f]{2})");
    private static final int SAID_MAX = 4 << 20;
    private static final int CHARACTERS_MAX = 150;
    private static final int KEPT = 100;
    private static final int DIGEST_CHARACTERS = 32;
    private final String path;
    private transient List<String> names;
    private transient List<String> folders;

    /** As Spark makes it: {@code job} is Spark's own id of the write. */
    public AttemptCommit(String job, String path, boolean isDynamic) {
        if (isDynamic) {
            throw new IllegalArgumentException("Partitions are not overwritten one by one here.");
        }
        this.path = path;
    }

    @Override
    public void setupJob(JobContext context) {}

    @Override
    public void setupTask(TaskAttemptContext context) {
        names = new ArrayList<>();
        folders = new ArrayList<>();
    }

    @Override
    public String newTaskTempFile(
            TaskAttemptContext context, Option<String> folder, FileNameSpec spec) {
        TaskContext task = TaskContext.get();
        String name =
                String.format(
                        Locale.ROOT, "part-%05d-%d-%05d.parquet",
                        task.partitionId(), task.taskAttemptId(), names.size());
        String value = folder.isDefined() ? value(folder.get()) : "";
        names.add(value.isEmpty() ? name : part(value) + "/" + name);
        folders.add(value);
        return path + "/" + names.get(names.size() - 1);
    }

    @Override
    public String newTaskTempFile(
            TaskAttemptContext context, Option<String> folder, String extension) {
        return newTaskTempFile(context, folder, new FileNameSpec("", extension));
    }

    @Override
    public String newTaskTempFileAbsPath(
            TaskAttemptContext context, String folder, FileNameSpec spec) {
        throw new UnsupportedOperationException("Files are written below one folder here.");
    }

    @Override
    public String newTaskTempFileAbsPath(
            TaskAttemptContext context, String folder, String extension) {
        throw new UnsupportedOperationException("Files are written below one folder here.");
    }

    @Override
    public TaskCommitMessage commitTask(TaskAttemptContext context) {
        try {
            for (String each : names) {
                Output.settle(new Path(path + "/" + each));
            }
            ArrayList<String> made = new ArrayList<>();
            long length = 0;
            for (int place = 0; place < names.size(); place++) {
                String said = Output.take(new Path(path + "/" + names.get(place)));
                if (!said.isEmpty()) {
                    length += said.length();
                    if (length > SAID_MAX) {
                        // A task that has written thousands of files: the driver has to hold it all.
                        said = said.substring(0, said.lastIndexOf(' ')) + " -";
                    }
                    made.add(said + " " + names.get(place) + " " + folders.get(place));
                }
            }
            return new TaskCommitMessage(made);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    @Override
    public void abortTask(TaskAttemptContext context) {
        for (String each : names == null ? List.<String>of() : names) {
            try {
                Output.drop(new Path(path + "/" + each));
            } catch (IOException error) {
                log().warn("an unfinished file stays until it is swept: " + error.getMessage());
            }
        }
    }

    @Override
    @SuppressWarnings("unchecked")
    public void commitJob(
            JobContext context, scala.collection.immutable.Seq<TaskCommitMessage> messages) {
        List<String> every = new ArrayList<>();
        for (TaskCommitMessage each : CollectionConverters.asJava(messages)) {
            every.addAll((List<String>) each.obj());
        }
        Registry.commit(path, every);
    }

    @Override
    public void abortJob(JobContext context) {}

    /** The value of the one column that a folder of Spark's is named after. */
    private static String value(String folder) {
        if (folder.indexOf('/') >= 0) {
            throw new UnsupportedOperationException("Files are divided by one column here.");
        }
        String escaped = folder.substring(folder.indexOf('=') + 1);
        return ESCAPED.matcher(escaped)
                .replaceAll(
                        found ->
                                java.util.regex.Matcher.quoteReplacement(
                                        String.valueOf(
                                                (char) Integer.parseInt(found.group(1), 16))));
    }

    /** A text as one part of a path, as {@code penstock.datasets.layout.part} writes it. */
    static String part(String text) {
        byte[] data = text.getBytes(StandardCharsets.UTF_8);
        StringBuilder written = new StringBuilder();
        for (int place = 0; place < data.length; place++) {
            int each = data[place] & 0xff;
            boolean isPlain =
                    each >= 'a' && each <= 'z' || each >= 'A' && each <= 'Z'
                            || each >= '0' && each <= '9' || "_=-".indexOf(each) >= 0
                            || each == '.' && place > 0 && data[place - 1] != '.';
            if (isPlain) {
                written.append((char) each);
            } else {
                written.append(String.format(Locale.ROOT, "~%02X", each));
            }
        }
        return written.length() <= CHARACTERS_MAX
                ? written.toString()
                : written.substring(0, KEPT) + "~~"
                        + Reach.sum(data).substring(0, DIGEST_CHARACTERS);
    }
}
