"""The counters for Prometheus."""

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from autodispatch import dispatcher, prometheus

registry = CollectorRegistry()
prometheus.register(registry=registry)
a, b1, b2 = (np.ones(shape, np.float32) for shape in ((16, 64), (64, 96), (64, 96)))
dispatcher.run(a, b1, b2)
print(generate_latest(registry).decode())
