-- The operators of the runtime `dispatcher`, for penstock.dispatcher.range_operators.

-- name: lock_aggregation
-- Until the end of the transaction; of one job and generation. The first number is ours alone: "rang".
SELECT pg_advisory_xact_lock(1918987879, hashtext(job_id || ':' || %(generation)s::text))
FROM job_definition
WHERE id = %(definition)s

-- name: covered_windows
-- The windows that the ranges of every input cover, and the news in each: the newest event of those
-- that overlap it, and how many they are. The number alone would not tell an event that was numbered
-- earlier and committed later. Ranges are looked for by how many bits their length has, so that one
-- that is very long does not make all others be looked at. IS TRUE and ORDER BY leave the planner one
-- index to use, that of ranges, whatever it knows of the table: by another it would look at all events
-- of a dataset for each window.
WITH inputs AS MATERIALIZED (
    SELECT inputs.input, inputs.dataset_id, inputs.generation, inputs.filter, sizes.bits
    FROM job_definition AS definition
    CROSS JOIN LATERAL penstock_inputs(definition.job_id, %(generation)s::uuid) AS inputs
    CROSS JOIN LATERAL (
        SELECT array_agg(size.bits) AS bits
        FROM generate_series(1, 64) AS size(bits)
        CROSS JOIN LATERAL (
            SELECT FROM event
            WHERE event.generation::text = inputs.generation::text
              AND event.range_start IS NOT NULL
              AND penstock_bits(event.range_start, event.range_end) = size.bits
            ORDER BY event.range_start
            LIMIT 1
        ) AS one
    ) AS sizes
    WHERE definition.id = %(definition)s
), wanted AS (
    SELECT * FROM unnest(%(starts)s::bigint[], %(ends)s::bigint[]) AS wanted("start", "end")
)
SELECT wanted."start", wanted."end", max(spans.seq) AS seq, sum(spans.count)::bigint AS count
FROM wanted
CROSS JOIN inputs
CROSS JOIN LATERAL (
    SELECT range_agg(int8range(found.range_start, found.range_end)) AS covered,
           max(found.seq) AS seq, count(*) AS count
    FROM unnest(inputs.bits) AS size(bits)
    CROSS JOIN LATERAL (
        SELECT event.seq, event.range_start, event.range_end
        FROM event
        WHERE (event.dataset_id = inputs.dataset_id) IS TRUE
          AND event.generation::text = inputs.generation::text
          AND event.range_start IS NOT NULL
          AND penstock_bits(event.range_start, event.range_end) = size.bits
          AND event.range_start < wanted."end"
          AND event.range_start >= greatest(
              -9223372036854775808, wanted."start" - power(2::numeric, size.bits))::bigint
          AND event.range_end > wanted."start"
          AND (inputs.filter IS NULL OR penstock_passes(
              inputs.filter, event.partition_key, event.range_start, event.range_end,
              event.cursor))
        OFFSET 0
    ) AS found
) AS spans
GROUP BY wanted."start", wanted."end"
HAVING coalesce(bool_and(spans.covered @> int8range(wanted."start", wanted."end")), false)
   AND count(*) FILTER (WHERE spans.covered IS NULL) = 0
ORDER BY wanted."start", wanted."end"
