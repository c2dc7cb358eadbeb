-- Many partitions that one attempt has found by itself: each has a folder inside of the attempt's.

-- The folder that a location lies in, however it is spelt: see datasets/layout.py. What was there
-- before has the same place: no partition is written as `~many`.
CREATE OR REPLACE FUNCTION penstock_place(location text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT substring(
        replace(replace(replace(replace(location, '%3D', '='), '%3d', '='), '%7E', '~'), '%7e', '~')
        FROM '/datasets/([^/]+/[^/]+/(?:~many/[0-9]+-[0-9]+-[0-9a-z]{24}/(?:~merge-[0-9]+/)?[^/]+'
             '|[^/]+/[0-9]+-[0-9]+-[0-9a-z]{24}))(?:/|$)')
$$;
