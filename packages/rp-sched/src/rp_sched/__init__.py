"""Plan and simulate pipeline schedules: from layer costs to a plan and its tasks. Standard library only."""

from rp_sched.errors import Infeasible, InvalidCost, InvalidOrder, InvalidPlan, InvalidTask, SchedError
from rp_sched.planners.adaptive import Search
from rp_sched.planners.balance import balance
from rp_sched.planners.microbatches import counts_of, fastest_count, memory_splits
from rp_sched.planners.multi_model import plan_together
from rp_sched.planners.planner import Strategy, plan
from rp_sched.planners.roundrobin import RoundRobin
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import Device, Host, Limits, Switch
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.problem.task_kinds import Kind, TaskKind
from rp_sched.problem.tasks import Task, check_order, order, without_backward_below
from rp_sched.replanning.estimator import Estimator
from rp_sched.replanning.kept import NOT_KEPT, KeptCalls, KeptLaunch, KeptPlan, NotKept
from rp_sched.replanning.launch_choice import GRAPH_GAIN, LaunchDecision
from rp_sched.replanning.launching import Launch, Launching
from rp_sched.replanning.replanner import Replanner
from rp_sched.simulation.assignment import Assigner
from rp_sched.simulation.makespan import PricedPlan
from rp_sched.simulation.resources import Resource
from rp_sched.simulation.simulate import simulate, simulated_ms
from rp_sched.simulation.stage_costs import host_bytes
from rp_sched.simulation.timeline import Idle, Reason, TaskSpan, Timeline

__version__ = "0.1.0"

# Their names in 0.1.0.
Course = PricedPlan
Dealer = Assigner

__all__ = [
    "GRAPH_GAIN",
    "NOT_KEPT",
    "Assigner",
    "Device",
    "Estimator",
    "Host",
    "Idle",
    "Infeasible",
    "InvalidCost",
    "InvalidOrder",
    "InvalidPlan",
    "InvalidTask",
    "KeptCalls",
    "KeptLaunch",
    "KeptPlan",
    "Kind",
    "Launch",
    "LaunchDecision",
    "Launching",
    "LayerCost",
    "Limits",
    "Mode",
    "NotKept",
    "Plan",
    "PricedPlan",
    "Reason",
    "Replanner",
    "Resource",
    "RoundRobin",
    "SchedError",
    "Search",
    "Strategy",
    "Switch",
    "Task",
    "TaskKind",
    "TaskSpan",
    "Timeline",
    "balance",
    "check_order",
    "counts_of",
    "fastest_count",
    "host_bytes",
    "memory_splits",
    "order",
    "plan",
    "plan_together",
    "simulate",
    "simulated_ms",
    "without_backward_below",
]
