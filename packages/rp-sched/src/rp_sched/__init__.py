"""Plan pipelines: costs in, plan and task list out. Standard library only."""

from rp_sched.costs import LayerCost, Limits
from rp_sched.errors import Infeasible, InvalidCost, InvalidOrder, InvalidPlan, InvalidTask, SchedError
from rp_sched.estimate import Estimator
from rp_sched.plan import Mode, Plan
from rp_sched.solve import Strategy, plan
from rp_sched.tasks import Kind, Task, check_order, order

__version__ = "0.1.0"

__all__ = [
    "Estimator",
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
    "SchedError",
    "Strategy",
    "Task",
    "check_order",
    "order",
    "plan",
]
