"""Plan pipelines: costs in, plan and task list out. Standard library only."""

from rp_sched.balance import balance
from rp_sched.costs import LayerCost, Limits
from rp_sched.course import Course
from rp_sched.deal import Dealer
from rp_sched.errors import Infeasible, InvalidCost, InvalidOrder, InvalidPlan, InvalidTask, SchedError
from rp_sched.estimate import Estimator
from rp_sched.loads import host_bytes
from rp_sched.plan import Mode, Plan
from rp_sched.replan import Replanner
from rp_sched.roundrobin import RoundRobin
from rp_sched.search import Search
from rp_sched.simulate import simulate
from rp_sched.solve import Strategy, plan
from rp_sched.tasks import Kind, Task, check_order, order
from rp_sched.timeline import Idle, Reason, Span, Timeline
from rp_sched.together import plan_together

__version__ = "0.1.0"

__all__ = [
    "Course",
    "Dealer",
    "Estimator",
    "Idle",
    "Infeasible",
    "InvalidCost",
    "InvalidOrder",
    "InvalidPlan",
    "InvalidTask",
    "Kind",
    "LayerCost",
    "Limits",
    "Mode",
    "Plan",
    "Reason",
    "Replanner",
    "RoundRobin",
    "SchedError",
    "Search",
    "Span",
    "Strategy",
    "Task",
    "Timeline",
    "balance",
    "check_order",
    "host_bytes",
    "order",
    "plan",
    "plan_together",
    "simulate",
]
