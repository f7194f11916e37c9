"""NUTS of blackjax on a logistic regression that is read as JSON; prints its draws as JSON. Run by test_blackjax."""

import json
import sys
import warnings

warnings.simplefilter("ignore")

import blackjax  # noqa: E402
import jax  # noqa: E402
from jax import numpy as jnp  # noqa: E402


def main():
    """Positions (S, P), leapfrogs (S,) and acceptance (S,) with unit mass and a standard normal prior."""
    asked = json.load(sys.stdin)
    x, y = jnp.asarray(asked["x"]), jnp.asarray(asked["y"])

    def log_density(w):
        logits = x @ w
        return jnp.sum(y * logits - jnp.logaddexp(0, logits)) - 0.5 * jnp.sum(w**2)

    kernel = blackjax.nuts(log_density, asked["step"], jnp.ones(x.shape[1]))

    def step(state, key):
        state, info = kernel.step(key, state)
        return state, (state.position, info.num_integration_steps, info.acceptance_rate)

    keys = jax.random.split(jax.random.key(0), asked["draws"])
    _, found = jax.lax.scan(step, kernel.init(jnp.zeros(x.shape[1])), keys)
    print(json.dumps([part.tolist() for part in found]))


if __name__ == "__main__":
    main()
