-- How each airport did on a day, by the hour that flights were to leave, in the wet and in the dry.
SELECT
  f._partition,
  f.day,
  f.origin,
  a.airport,
  f.hour,
  coalesce(f.is_wet, false) AS is_wet,
  count(*) AS flights,
  count_if(f.is_cancelled) AS cancelled,
  count_if(f.departure_delay_minutes >= 15) AS late,
  coalesce(sum(f.departure_delay_minutes), 0) AS delay_minutes
FROM observed AS f
LEFT JOIN airports AS a ON a.code = f.origin
GROUP BY f._partition, f.day, f.origin, a.airport, f.hour, coalesce(f.is_wet, false)
