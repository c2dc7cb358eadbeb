"""Figures: `reading` reads gauges, `counters` counts, `exposition` writes both for Prometheus."""
