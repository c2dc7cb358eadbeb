"""Backpressure: `deciding` decides who pauses for whom, `pressures` measures and writes."""
