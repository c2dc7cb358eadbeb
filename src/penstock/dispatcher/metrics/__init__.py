"""Figures: `reading` reads them, `exposition` writes them as Prometheus wants them."""
