-- How each airline did on a day. Counts and sums only, so that months can be made of days.
SELECT
  f._partition,
  f.day,
  f.carrier,
  a.airline,
  count(*) AS flights,
  count_if(f.is_cancelled) AS cancelled,
  count_if(f.departure_delay_minutes >= 15) AS late,
  coalesce(sum(f.departure_delay_minutes), 0) AS delay_minutes,
  sum(f.distance_miles) AS distance_miles,
  coalesce(sum(if(f.is_cancelled, 0, f.seats)), 0) AS known_seats
FROM observed AS f
LEFT JOIN airlines AS a ON a.carrier = f.carrier
GROUP BY f._partition, f.day, f.carrier, a.airline
