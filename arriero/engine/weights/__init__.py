"""The weight plane: new weights from the trainer into running generators, verified tensor by tensor."""

from arriero.engine.weights.layout import StaleWeights, WeightError
from arriero.engine.weights.plan import Plan, plan_weights
from arriero.engine.weights.plane import WeightReceiver, WeightSender, fingerprint_weights, verify_weights
from arriero.engine.weights.sharded import ShardReceiver, ShardSender, Standby
from arriero.engine.weights.sharding import llama_layout, replicated_layout
from arriero.engine.weights.shm import destroy

__all__ = [
    "Plan",
    "ShardReceiver",
    "ShardSender",
    "StaleWeights",
    "Standby",
    "WeightError",
    "WeightReceiver",
    "WeightSender",
    "destroy",
    "fingerprint_weights",
    "llama_layout",
    "plan_weights",
    "replicated_layout",
    "verify_weights",
]
