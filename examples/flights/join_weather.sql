-- Each flight with the weather at its airport in the hour it was to leave, and with its aircraft.
SELECT
  f.*,
  try_cast(w.temp AS DOUBLE) AS temperature_fahrenheit,
  try_cast(w.wind_speed AS DOUBLE) AS wind_mph,
  try_cast(w.visib AS DOUBLE) AS visibility_miles,
  try_cast(w.precip AS DOUBLE) > 0 AS is_wet,
  p.seats
FROM flights AS f
LEFT JOIN raw_weather AS w
  ON w._partition = f._partition
  AND w.origin = f.origin
  AND CAST(w.time_hour AS TIMESTAMP) = f.planned_hour
LEFT JOIN planes AS p ON p.tail_number = f.tail_number
