package penstock.spark;

import java.io.IOException;
import java.util.Map;
import org.apache.spark.SparkContext;
import org.apache.spark.api.plugin.DriverPlugin;
import org.apache.spark.api.plugin.ExecutorPlugin;
import org.apache.spark.api.plugin.PluginContext;
import org.apache.spark.api.plugin.SparkPlugin;

/**
 * How executors ask the driver: by the RPC of their Spark application, which is as authenticated and
 * encrypted as its cluster is told. Messages are texts and arrays of texts, because Spark reads them
 * with a class loader that does not know this jar.
 */
public final class Plugin implements SparkPlugin {
    private static final String REACH = "reach ";
    private static final String FILE = "file ";
    private static volatile boolean isDriver;
    private static volatile PluginContext executor;

    /** How a bucket is reached now. */
    static Reach reach(String bucket) throws IOException {
        Reach found =
                isDriver
                        ? Registry.reachOf(bucket)
                        : Reach.of((String[]) ask(REACH + bucket));
        if (found == null) {
            throw new IOException("No task of Penstock uses the bucket " + bucket + ".");
        }
        return found;
    }

    /** A file that a plan reads, null if none does. */
    static Registry.Known known(String path) throws IOException {
        if (isDriver) {
            return Registry.known(path);
        }
        String said = (String) ask(FILE + path);
        return said == null || said.isEmpty() ? null : Registry.Known.of(said);
    }

    private static Object ask(String message) throws IOException {
        PluginContext context = executor;
        if (context == null) {
            throw new IOException("spark.plugins has to name " + Plugin.class.getName() + ".");
        }
        try {
            return context.ask(message);
        } catch (InterruptedException error) {
            throw Buckets.interrupted(error);
        } catch (Exception error) {
            throw new IOException("The driver did not say how a bucket is reached.", error);
        }
    }

    @Override
    public DriverPlugin driverPlugin() {
        return new DriverPlugin() {
            @Override
            public Map<String, String> init(SparkContext context, PluginContext plugin) {
                isDriver = true;
                return Map.of();
            }

            @Override
            public Object receive(Object message) {
                String said = (String) message;
                if (said.startsWith(FILE)) {
                    Registry.Known known = Registry.known(said.substring(FILE.length()));
                    return known == null ? "" : known.text();
                }
                Reach reach = Registry.reachOf(said.substring(REACH.length()));
                return reach == null ? new String[0] : reach.texts();
            }
        };
    }

    @Override
    public ExecutorPlugin executorPlugin() {
        return new ExecutorPlugin() {
            @Override
            public void init(PluginContext plugin, Map<String, String> more) {
                executor = plugin;
            }
        };
    }
}
