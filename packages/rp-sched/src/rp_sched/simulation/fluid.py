"""A fluid simulation: activities that wait for each other, and share resources fairly while they run."""

import heapq
from collections.abc import Iterable, Sequence

# A resource's capacity; what is above it by less is rounding.
FULL = 1 + 1e-9


class Activity:
    """Something that takes time; made by `Fluid.add`, and over once `end_ms` is not None.

    `shares`: by resource, the part of it that the activity uses at full speed. `rate`: its speed now, at most 1.
    """

    __slots__ = ("after", "end_ms", "full_ms", "last_ms", "rate", "shares", "start_ms", "turn", "waits")

    def __init__(self, full_ms: float, shares: Sequence[tuple[int, float]]) -> None:
        self.full_ms = full_ms
        self.shares = shares
        self.start_ms = 0.0
        self.end_ms: float | None = None
        # While it waits, the latest time that it knows it must wait for; while it runs, when it will end.
        self.last_ms = 0.0
        self.rate = 1.0
        self.turn = 0
        self.waits = 0
        self.after: list[tuple[Activity, float]] = []

    @property
    def ended_ms(self) -> float:
        """When it ended; only once it has."""
        assert self.end_ms is not None
        return self.end_ms


class Fluid:
    """An event-driven simulation of activities.

    >>> fluid = Fluid()
    >>> one, two = (fluid.add(3.0, [(0, 0.75)]) for _ in range(2))
    >>> last = fluid.add(1.0, after=[(one, 0.5), (two, 0.0)])
    >>> fluid.run()
    >>> one.ended_ms, two.ended_ms, last.ended_ms
    (4.5, 4.5, 6.0)

    An activity starts when those before it have ended, each with its delay. It runs at full speed unless resources
    that it shares are overloaded. Each of those is then divided into equal parts among the activities that use it;
    what some do not need goes to the others (max-min fairness, as in Bertsekas and Gallager, "Data Networks",
    section 6.5.2; SimGrid simulates computers so).
    """

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._events: list[tuple[float, int, int, Activity]] = []
        self._made = 0
        # Activities that run and share resources, and the load on each of these at full speed.
        self._sharing: dict[Activity, None] = {}
        self._load: dict[int, float] = {}
        self._throttled = False

    def add(
        self,
        full_ms: float,
        shares: Sequence[tuple[int, float]] = (),
        after: Iterable[tuple[Activity, float]] = (),
    ) -> Activity:
        """An activity that takes `full_ms` at full speed; it starts now, or after others, with a delay each."""
        added = Activity(full_ms, shares)
        added.last_ms = self.now_ms
        for before, delay_ms in after:
            if before.end_ms is None:
                before.after.append((added, delay_ms))
                added.waits += 1
            else:
                added.last_ms = max(added.last_ms, before.end_ms + delay_ms)
        if not added.waits:
            self._push(added, added.last_ms)
        return added

    def run(self) -> None:
        """Simulate until all activities have ended."""
        while self._events:
            self.step()

    def _push(self, activity: Activity, at_ms: float) -> None:
        self._made += 1
        heapq.heappush(self._events, (at_ms, self._made, activity.turn, activity))

    def step(self) -> None:
        """Simulate all events of the next moment; then divide the resources anew if their users have changed."""
        self.now_ms = now_ms = self._events[0][0]
        changed = False
        while self._events and self._events[0][0] == now_ms:
            _, _, turn, activity = heapq.heappop(self._events)
            if turn != activity.turn:
                continue
            activity.turn += 1
            if turn == 0:
                changed |= self._start(activity)
            else:
                changed |= self._end(activity)
        if changed:
            self._divide()

    def _start(self, activity: Activity) -> bool:
        activity.start_ms = self.now_ms
        activity.last_ms = self.now_ms + activity.full_ms
        shares = bool(activity.shares and activity.full_ms)
        if shares:
            self._sharing[activity] = None
            self._count(activity, 1)
        self._push(activity, activity.last_ms)
        return shares

    def _end(self, activity: Activity) -> bool:
        activity.end_ms = self.now_ms
        for later, delay_ms in activity.after:
            later.last_ms = max(later.last_ms, self.now_ms + delay_ms)
            later.waits -= 1
            if not later.waits:
                self._push(later, later.last_ms)
        activity.after = []
        if activity not in self._sharing:
            return False
        del self._sharing[activity]
        self._count(activity, -1)
        return True

    def _count(self, activity: Activity, sign: int) -> None:
        for resource, share in activity.shares:
            self._load[resource] = self._load.get(resource, 0.0) + sign * share

    def _divide(self) -> None:
        overloaded = any(load > FULL for load in self._load.values())
        if not overloaded and not self._throttled:
            return
        self._throttled = overloaded
        for activity, rate in divided(list(self._sharing)).items():
            if rate != activity.rate:
                left_ms = (activity.last_ms - self.now_ms) * activity.rate
                activity.rate = rate
                activity.last_ms = self.now_ms + left_ms / rate
                activity.turn += 1
                self._push(activity, activity.last_ms)


def divided(sharing: Sequence[Activity]) -> dict[Activity, float]:
    """The speeds of activities that run at once: full, unless a resource has not enough for all that use it.

    >>> small, large = (Activity(1.0, [(0, share)]) for share in (0.3, 0.9))
    >>> [round(rate, 3) for rate in divided([small, large]).values()]
    [1.0, 0.778]
    """
    rates = dict.fromkeys(sharing, 1.0)
    users: dict[int, list[tuple[Activity, float]]] = {}
    for activity in sharing:
        for resource, share in activity.shares:
            users.setdefault(resource, []).append((activity, share))
    # Each resource is divided once, the most overloaded first: speeds only fall, so it stays within its capacity.
    while users:
        load = {at: sum(share * rates[user] for user, share in using) for at, using in users.items()}
        most = max(load, key=load.__getitem__)
        if load[most] <= FULL:
            break
        _divide_one(users.pop(most), rates)
    return rates


def _divide_one(using: Sequence[tuple[Activity, float]], rates: dict[Activity, float]) -> None:
    room, count = 1.0, len(using)
    for wanted, user in sorted(((share * rates[user], user) for user, share in using), key=lambda one: one[0]):
        part = min(wanted, room / count)
        rates[user] *= part / wanted
        room -= part
        count -= 1
