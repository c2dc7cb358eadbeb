package penstock.spark;

import java.io.ByteArrayInputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.security.KeyStore;
import java.security.cert.Certificate;
import java.security.cert.CertificateFactory;
import java.time.Duration;
import java.time.Instant;
import java.time.format.DateTimeFormatter;
import java.time.format.DateTimeParseException;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

/**
 * Signed requests to one bucket. Everything asked here may be asked again, and is, while the server
 * is away for less than {@link #PATIENCE}, and {@link #TRIES_MIN} times at least; each request is
 * bounded as a whole, its body included.
 *
 * <p>Keys are asked of the driver again after {@link #KEYS_KEPT}, and before whatever is asked again: a
 * server that refuses keys may close the connection instead of saying so. When it says that they are
 * no longer good, the driver may learn of new ones a moment later, for which {@link #RENEWAL} is left.
 * Requests are dated by the server's clock where it says that the one of this machine is wrong.
 * Connections are kept and shared by all tasks of the process.
 */
final class Bucket {
    static final int CHUNK = 8 << 20;
    private static final Duration PATIENCE = Duration.ofSeconds(60);
    private static final Duration REQUEST = Duration.ofSeconds(60);
    private static final Duration CONNECT = Duration.ofSeconds(10);
    private static final Duration KEYS_KEPT = Duration.ofSeconds(60);
    private static final Duration RENEWAL = Duration.ofSeconds(15);
    private static final int TRIES_MIN = 3;
    private static final int TRIES_MAX = 30;
    private static final long PAUSE_MS = 100;
    private static final long PAUSE_MS_MAX = 3000;
    private static final int AT_ONCE = Math.max(16, 2 * Runtime.getRuntime().availableProcessors());
    private static final Pattern CODE = Pattern.compile("<Code>([A-Za-z]+)</Code>");
    private static final List<String> STALE =
            List.of("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId");
    private static final String SKEWED = "RequestTimeTooSkewed";
    private static final Map<String, Bucket> OPENED = new ConcurrentHashMap<>();
    private static final ExecutorService POOL = pool(AT_ONCE, "penstock-s3");

    private final String name;
    private volatile Reach reach;
    private volatile long reachAt;
    private volatile HttpClient client;
    private volatile Duration skew = Duration.ZERO;

    /** What was answered. */
    record Answer(int status, HttpResponse<byte[]> response) {
        byte[] body() {
            return response.body();
        }

        String header(String name) {
            return response.headers().firstValue(name).orElse("");
        }

        String code() {
            Matcher found = CODE.matcher(new String(body(), StandardCharsets.UTF_8));
            return found.find() ? found.group(1) : "";
        }
    }

    /** What is asked. The body is {@code length} bytes from its beginning. */
    record Ask(
            String method, String key, Map<String, String> query, Map<String, String> headers,
            byte[] body, int length) {
        Ask(String method, String key, Map<String, String> query, Map<String, String> headers) {
            this(method, key, query, headers, new byte[0], 0);
        }
    }

    private Bucket(String name) {
        this.name = name;
    }

    static Bucket of(String name) {
        return OPENED.computeIfAbsent(name, Bucket::new);
    }

    /** Run something beside the task that waits for it. */
    static <T> Future<T> aside(java.util.concurrent.Callable<T> work) {
        return POOL.submit(work);
    }

    /** A range of an object; with an ETag, of just that object. */
    Answer range(String key, String range, String etag) throws IOException {
        Map<String, String> headers =
                etag.isEmpty() ? Map.of("range", range) : Map.of("range", range, "if-match", etag);
        return send(new Ask("GET", key, Map.of(), headers));
    }

    void put(String key, byte[] body, int length) throws IOException {
        expect(send(new Ask("PUT", key, Map.of(), Map.of(), body, length)), key, 200);
    }

    void delete(String key) throws IOException {
        expect(send(new Ask("DELETE", key, Map.of(), Map.of())), key, 200, 204, 404);
    }

    /** Raise what an answer means unless it has one of these statuses. */
    void expect(Answer answer, String key, int... statuses) throws IOException {
        for (int each : statuses) {
            if (answer.status() == each) {
                return;
            }
        }
        String path = name + "/" + key;
        if (answer.status() == 404) {
            throw new FileNotFoundException("There is no object s3://" + path + ".");
        }
        if (answer.status() == 412) {
            throw new Damaged(path, "it was replaced while it was read.");
        }
        String code = answer.code();
        throw new IOException(
                "s3://" + path + " was refused with status " + answer.status()
                        + (code.isEmpty() ? "" : " (" + code + ")")
                        + (SKEWED.equals(code) ? ": set the clock of this machine." : "."));
    }

    /** Ask until there is an answer that asking again would not change. */
    Answer send(Ask ask) throws IOException {
        long began = System.nanoTime();
        boolean isTimed = false;
        for (int tries = 1; ; tries++) {
            IOException trouble;
            try {
                Answer answer = once(ask, reach(tries > 1));
                boolean isRefused = answer.status() == 403 || answer.status() == 400;
                if (isRefused && STALE.contains(answer.code()) && isWithin(RENEWAL, began)) {
                    if (tries > 1) {
                        pause(tries);
                    }
                    continue;
                }
                if (isRefused && !isTimed && SKEWED.equals(answer.code())) {
                    isTimed = true;
                    skew = skew(answer.header("date"));
                    continue;
                }
                if (answer.status() < 500 && answer.status() != 429 && answer.status() != 408) {
                    return answer;
                }
                trouble = new IOException("the answer was " + answer.status());
            } catch (java.io.InterruptedIOException error) {
                throw error;
            } catch (IOException error) {
                trouble = error;
            }
            // One connection that hangs takes all of the patience, and another would do.
            boolean isOver = !isWithin(PATIENCE, began) && tries >= TRIES_MIN;
            if (isOver || tries >= TRIES_MAX) {
                throw new IOException(
                        "s3://" + name + "/" + ask.key() + " could not be reached: "
                                + trouble.getMessage() + ".",
                        trouble);
            }
            pause(tries);
        }
    }

    private static boolean isWithin(Duration length, long began) {
        return System.nanoTime() - began < length.toNanos();
    }

    private Answer once(Ask ask, Reach reach) throws IOException {
        String path = reach.path(ask.key());
        String query = Reach.query(ask.query());
        URI uri = URI.create(reach.endpoint() + path + (query.isEmpty() ? "" : "?" + query));
        java.security.MessageDigest digest = Reach.sha256();
        digest.update(ask.body(), 0, ask.length());
        String sum = java.util.HexFormat.of().formatHex(digest.digest());
        HttpRequest.Builder request = HttpRequest.newBuilder(uri).timeout(REQUEST);
        reach.signed(
                        ask.method(), path, query, uri.getRawAuthority(), sum, ask.headers(),
                        Instant.now().plus(skew))
                .forEach(request::header);
        request.method(
                ask.method(),
                ask.length() == 0 && !ask.method().equals("PUT")
                        ? HttpRequest.BodyPublishers.noBody()
                        : HttpRequest.BodyPublishers.ofByteArray(ask.body(), 0, ask.length()));
        CompletableFuture<HttpResponse<byte[]>> coming =
                client(reach).sendAsync(request.build(), HttpResponse.BodyHandlers.ofByteArray());
        try {
            HttpResponse<byte[]> found = coming.get(REQUEST.toSeconds(), TimeUnit.SECONDS);
            return new Answer(found.statusCode(), found);
        } catch (InterruptedException error) {
            coming.cancel(true);
            throw Buckets.interrupted(error);
        } catch (TimeoutException error) {
            coming.cancel(true);
            throw new IOException("no answer in " + REQUEST.toSeconds() + " seconds");
        } catch (ExecutionException error) {
            throw new IOException(String.valueOf(error.getCause()), error.getCause());
        }
    }

    /** How far a server's clock is ahead of the one of this machine. */
    private static Duration skew(String date) {
        try {
            Instant theirs = Instant.from(DateTimeFormatter.RFC_1123_DATE_TIME.parse(date));
            return Duration.between(Instant.now(), theirs);
        } catch (DateTimeParseException error) {
            return Duration.ZERO;
        }
    }

    private Reach reach(boolean isAnew) throws IOException {
        Reach known = reach;
        if (!isAnew && known != null && System.nanoTime() - reachAt < KEYS_KEPT.toNanos()) {
            return known;
        }
        Reach found = Plugin.reach(name);
        reachAt = System.nanoTime();
        reach = found;
        return found;
    }

    private synchronized HttpClient client(Reach reach) throws IOException {
        if (client == null) {
            HttpClient.Builder made =
                    HttpClient.newBuilder()
                            .version(HttpClient.Version.HTTP_1_1)
                            .connectTimeout(CONNECT)
                            .executor(pool(AT_ONCE, "penstock-http"));
            if (!reach.authorities().isEmpty()) {
                made.sslContext(trusting(reach.authorities()));
            }
            client = made.build();
        }
        return client;
    }

    private static SSLContext trusting(String authorities) throws IOException {
        try {
            KeyStore store = KeyStore.getInstance(KeyStore.getDefaultType());
            store.load(null, null);
            int number = 0;
            byte[] text = authorities.getBytes(StandardCharsets.US_ASCII);
            for (Certificate each :
                    CertificateFactory.getInstance("X.509")
                            .generateCertificates(new ByteArrayInputStream(text))) {
                store.setCertificateEntry("authority-" + number++, each);
            }
            TrustManagerFactory trust =
                    TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
            trust.init(store);
            SSLContext context = SSLContext.getInstance("TLS");
            context.init(null, trust.getTrustManagers(), null);
            return context;
        } catch (GeneralSecurityException error) {
            throw new IOException("AWS_CA_BUNDLE holds no certificates that Java can read.", error);
        }
    }

    private static void pause(int tries) throws IOException {
        long most = Math.min(PAUSE_MS_MAX, PAUSE_MS << Math.min(tries, 10));
        try {
            Thread.sleep(ThreadLocalRandom.current().nextLong(most / 2, most));
        } catch (InterruptedException error) {
            throw Buckets.interrupted(error);
        }
    }

    private static ExecutorService pool(int size, String name) {
        return Executors.newFixedThreadPool(
                size,
                work -> {
                    Thread made = new Thread(work, name);
                    made.setDaemon(true);
                    return made;
                });
    }
}
