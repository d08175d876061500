"""How much hypothesis tries: enough to find, short enough to run often."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("rp_batch", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rp_batch")
