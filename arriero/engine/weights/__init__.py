"""The weight plane: new weights from the trainer into running generators, verified tensor by tensor."""

from arriero.engine.weights.layout import StaleWeights, WeightError
from arriero.engine.weights.plane import WeightReceiver, WeightSender, fingerprint_weights, verify_weights
from arriero.engine.weights.shm import destroy

__all__ = [
    "StaleWeights",
    "WeightError",
    "WeightReceiver",
    "WeightSender",
    "destroy",
    "fingerprint_weights",
    "verify_weights",
]
