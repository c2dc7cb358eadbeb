package penstock.spark;

import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.security.MessageDigest;
import java.time.Instant;
import java.time.ZoneOffset;
import java.time.format.DateTimeFormatter;
import java.util.HexFormat;
import java.util.Map;
import java.util.TreeMap;
import java.util.stream.Collectors;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;

/**
 * Where a bucket is and with what requests to it are signed: AWS Signature Version 4, for S3.
 *
 * <p>{@code root} is the path that keys are below: empty, or the bucket. {@code authorities} are
 * certificates as PEM, or empty for those that Java knows. It never shows its keys.
 */
record Reach(
        String endpoint,
        String root,
        String region,
        String authorities,
        String accessKey,
        String secretKey,
        String token) {
    private static final DateTimeFormatter MOMENT =
            DateTimeFormatter.ofPattern("yyyyMMdd'T'HHmmss'Z'").withZone(ZoneOffset.UTC);
    private static final String ALGORITHM = "AWS4-HMAC-SHA256";
    private static final String UNRESERVED =
            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~";

    static Reach of(String[] said) {
        return said.length < 7
                ? null
                : new Reach(said[0], said[1], said[2], said[3], said[4], said[5], said[6]);
    }

    String[] texts() {
        return new String[] {
            endpoint, root, region, authorities, accessKey, secretKey, token
        };
    }

    String path(String key) {
        return encoded(root + "/" + key, "/");
    }

    static String query(Map<String, String> query) {
        return new TreeMap<>(query)
                .entrySet().stream()
                        .map(each -> encoded(each.getKey(), "") + "=" + encoded(each.getValue(), ""))
                        .collect(Collectors.joining("&"));
    }

    /** All headers of a request but for {@code host}, which the client sends; names in lower case. */
    Map<String, String> signed(
            String method, String path, String query, String host, String bodySum,
            Map<String, String> headers, Instant at) {
        String moment = MOMENT.format(at);
        String day = moment.substring(0, 8);
        TreeMap<String, String> every = new TreeMap<>(headers);
        every.put("host", host);
        every.put("x-amz-content-sha256", bodySum);
        every.put("x-amz-date", moment);
        if (!token.isEmpty()) {
            every.put("x-amz-security-token", token);
        }
        String names = String.join(";", every.keySet());
        StringBuilder canonical = new StringBuilder();
        canonical.append(method).append('\n').append(path).append('\n').append(query).append('\n');
        every.forEach((name, value) ->
                canonical.append(name).append(':').append(value.strip()).append('\n'));
        canonical.append('\n').append(names).append('\n').append(bodySum);
        String scope = day + "/" + region + "/s3/aws4_request";
        String text =
                ALGORITHM + "\n" + moment + "\n" + scope + "\n" + sum(utf8(canonical.toString()));
        byte[] key = utf8("AWS4" + secretKey);
        for (String part : new String[] {day, region, "s3", "aws4_request"}) {
            key = mac(key, part);
        }
        String signature = HexFormat.of().formatHex(mac(key, text));
        every.put(
                "authorization",
                ALGORITHM + " Credential=" + accessKey + "/" + scope
                        + ", SignedHeaders=" + names + ", Signature=" + signature);
        every.remove("host");
        return every;
    }

    @Override
    public String toString() {
        return endpoint + root;
    }

    static String sum(byte[] body) {
        MessageDigest digest = sha256();
        digest.update(body);
        return HexFormat.of().formatHex(digest.digest());
    }

    static MessageDigest sha256() {
        try {
            return MessageDigest.getInstance("SHA-256");
        } catch (GeneralSecurityException error) {
            throw new IllegalStateException(error);
        }
    }

    private static byte[] mac(byte[] key, String text) {
        try {
            Mac mac = Mac.getInstance("HmacSHA256");
            mac.init(new SecretKeySpec(key, "HmacSHA256"));
            return mac.doFinal(utf8(text));
        } catch (GeneralSecurityException error) {
            throw new IllegalStateException(error);
        }
    }

    private static String encoded(String text, String kept) {
        StringBuilder found = new StringBuilder();
        for (byte each : utf8(text)) {
            char character = (char) (each & 0xff);
            if ((UNRESERVED + kept).indexOf(character) >= 0) {
                found.append(character);
            } else {
                found.append(String.format("%%%02X", each & 0xff));
            }
        }
        return found.toString();
    }

    private static byte[] utf8(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }
}
