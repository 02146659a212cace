"""All checks, by their names."""

from tests.engine.eight_devices import (
    communication,
    every_method,
    layers,
    refusals,
    shard_map_of_users,
    training,
    values,
)

MODULES = (shard_map_of_users, values, every_method, communication, refusals, layers, training)
CHECKS = {
    name: check for module in MODULES for name, check in vars(module).items() if name.startswith("check_")
}
