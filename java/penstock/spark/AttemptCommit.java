package penstock.spark;

import java.io.IOException;
import java.io.Serializable;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.List;
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
 */
public final class AttemptCommit extends FileCommitProtocol implements Serializable {
    private static final long serialVersionUID = 1;
    private final String path;
    private transient List<String> names;

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
    }

    @Override
    public String newTaskTempFile(
            TaskAttemptContext context, Option<String> folder, FileNameSpec spec) {
        TaskContext task = TaskContext.get();
        String name =
                String.format(
                        "part-%05d-%d-%03d.parquet",
                        task.partitionId(), task.taskAttemptId(), names.size());
        names.add(folder.isDefined() ? folder.get() + "/" + name : name);
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
            ArrayList<String> made = new ArrayList<>();
            for (String each : names) {
                String said = PartOutput.take(new Path(path + "/" + each));
                if (!said.isEmpty()) {
                    made.add(said + " " + each);
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
                PartOutput.drop(new Path(path + "/" + each));
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
}
