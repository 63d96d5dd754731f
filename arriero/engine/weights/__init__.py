"""The weight plane: new weights from the trainer into running generators, verified tensor by tensor."""

from arriero.engine.weights.layout import SenderGone, StaleWeights, WeightError
from arriero.engine.weights.live_layout import replicated_layout
from arriero.engine.weights.plan import Plan, plan_weights
from arriero.engine.weights.plane import WeightReceiver, WeightSender
from arriero.engine.weights.ranks import GroupRanks
from arriero.engine.weights.receiver import ShardReceiver, Standby
from arriero.engine.weights.sender import ShardSender
from arriero.engine.weights.sharding import llama_layout
from arriero.engine.weights.shm import destroy

__all__ = [
    "GroupRanks",
    "Plan",
    "SenderGone",
    "ShardReceiver",
    "ShardSender",
    "StaleWeights",
    "Standby",
    "WeightError",
    "WeightReceiver",
    "WeightSender",
    "destroy",
    "llama_layout",
    "plan_weights",
    "replicated_layout",
]
