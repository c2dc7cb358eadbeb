-- One row for each planned flight: texts become numbers, NA becomes null, names say what they mean.
-- A flight without a departure delay never left.
SELECT
  _partition,
  make_date(CAST(year AS INT), CAST(month AS INT), CAST(day AS INT)) AS day,
  CAST(time_hour AS TIMESTAMP) AS planned_hour,
  CAST(hour AS INT) AS hour,
  origin,
  dest AS destination,
  carrier,
  CAST(flight AS INT) AS flight,
  nullif(tailnum, 'NA') AS tail_number,
  try_cast(dep_delay AS INT) AS departure_delay_minutes,
  try_cast(arr_delay AS INT) AS arrival_delay_minutes,
  CAST(distance AS INT) AS distance_miles,
  try_cast(dep_delay AS INT) IS NULL AS is_cancelled
FROM raw_flights
