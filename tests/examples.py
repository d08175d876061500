"""How many examples Hypothesis tries, by profile: tests name the numbers of ``thorough``."""

from __future__ import annotations

from hypothesis import Phase, settings

# The profile whose numbers are those that tests name.
_THOROUGH = 100


def register_profiles() -> None:
    """Register all and choose ``quick``; ``--hypothesis-profile=ci`` or ``thorough`` chooses another one."""
    settings.register_profile("quick", max_examples=10, deadline=None)
    settings.register_profile("ci", max_examples=30, deadline=None)
    settings.register_profile("thorough", max_examples=_THOROUGH, deadline=None)
    # For code that is broken on purpose: it need not be told how, only that, and in every run alike.
    generate = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutation", max_examples=40, deadline=None, phases=generate, derandomize=True, database=None
    )
    settings.load_profile("quick")


def examples(thorough: int) -> int:
    """How many to try of as many as a thorough run tries.

    >>> with_profile = lambda name: (settings.load_profile(name), examples(60))[1]
    >>> register_profiles()
    >>> with_profile("thorough"), with_profile("quick")
    (60, 6)
    """
    return max(1, thorough * settings.default.max_examples // _THOROUGH)


def dear(thorough: int) -> int:
    """How many to try where each takes long: a third of `examples`, except in a thorough run.

    >>> with_profile = lambda name: (settings.load_profile(name), dear(60))[1]
    >>> register_profiles()
    >>> with_profile("thorough"), with_profile("ci"), with_profile("quick")
    (60, 6, 2)
    """
    count = examples(thorough)
    return count if count >= thorough else max(1, count // 3)
