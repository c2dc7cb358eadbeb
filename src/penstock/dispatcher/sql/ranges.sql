-- The operators of the runtime `dispatcher`, for penstock.dispatcher.ranges.

-- name: lock_aggregation
-- Until the end of the transaction; of one job and generation. The first number is ours alone: "rang".
SELECT pg_advisory_xact_lock(1918987879, hashtext(job_id || ':' || %(generation)s::text))
FROM job_definition
WHERE id = %(definition)s

-- name: covered_windows
-- The windows that the ranges of every input cover, and the newest event of those that overlap it.
-- No range is longer than the longest, so ranges that begin earlier than that cannot overlap.
WITH inputs AS MATERIALIZED (
    SELECT inputs.input, inputs.dataset_id, inputs.generation, inputs.filter, longest.length
    FROM job_definition AS definition
    CROSS JOIN LATERAL penstock_inputs(definition.job_id, %(generation)s::uuid) AS inputs
    CROSS JOIN LATERAL (
        SELECT max(event.range_end::numeric - event.range_start) AS length
        FROM event
        WHERE event.dataset_id = inputs.dataset_id AND event.generation = inputs.generation
          AND event.range_start IS NOT NULL
    ) AS longest
    WHERE definition.id = %(definition)s
), wanted AS (
    SELECT * FROM unnest(%(starts)s::bigint[], %(ends)s::bigint[]) AS wanted("start", "end")
)
SELECT wanted."start", wanted."end", max(spans.seq) AS seq
FROM wanted
CROSS JOIN inputs
CROSS JOIN LATERAL (
    SELECT range_agg(int8range(event.range_start, event.range_end)) AS covered,
           max(event.seq) AS seq
    FROM event
    WHERE event.dataset_id = inputs.dataset_id AND event.generation = inputs.generation
      AND event.range_start IS NOT NULL AND event.range_start < wanted."end"
      AND event.range_start >= greatest(
          -9223372036854775808, wanted."start" - inputs.length)::bigint
      AND event.range_end > wanted."start"
      AND (inputs.filter IS NULL OR penstock_passes(
          inputs.filter, event.partition_key, event.range_start, event.range_end, event.cursor))
) AS spans
GROUP BY wanted."start", wanted."end"
HAVING coalesce(bool_and(spans.covered @> int8range(wanted."start", wanted."end")), false)
   AND count(*) FILTER (WHERE spans.covered IS NULL) = 0
ORDER BY wanted."start", wanted."end"
