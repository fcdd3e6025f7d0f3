"""Settings for every test: Hypothesis without a clock, on machines that may be busy."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")
