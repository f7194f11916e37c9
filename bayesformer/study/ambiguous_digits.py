"""Making Ambiguous-MNIST by the recipe of Mukhoti et al. (2021): mixtures of digits in the code space of a variational
autoencoder, of which those are kept that an ensemble finds ambiguous and knows to be so.

Of a mixture the predictive entropy H and the mutual information I of label and network are computed; kept is I ≤ .05
(no doubt about the network) and H ≥ .05 (doubt about the digit). Of the kept ones some are chosen so that entropies are
spread evenly. Numbers of epochs and of candidates are smaller than theirs, so that one core takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.rules import above, at_least, check_ranges, whole
from bayesformer.core.seeds import generator, stream
from bayesformer.core.storage import write_tensors
from bayesformer.data import Data, as_batches
from bayesformer.datasets.ambiguous_mnist import FORMAT, PARTS, file_of
from bayesformer.datasets.mnist import SIDE, read
from bayesformer.datasets.sources import MNIST, DataSource
from bayesformer.likelihoods import Categorical
from bayesformer.likelihoods.predictive import CategoricalPredictive
from bayesformer.methods import Ensemble, Problem
from bayesformer.posterior import Posterior
from bayesformer.train.training import Training

MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels, as the recipe has them
CODE = 32  # numbers of a code
MIXED, MIXTURES = (2, 3, 4), 64  # digits in a mixture, mixtures of the same digits
BINS, LOW, HIGH = 50, 0.05, 1.6  # of the histogram that evens out the entropies
EVENING = 0.2  # images taken of a bin are as its count to this power
CHUNK = 4096


@dataclass(frozen=True)
class Recipe:
    """How many of what: the recipe's own numbers are 74 and 19 epochs and four million candidates."""

    images: int = 12_000
    """images in all, half of them for training"""
    kept: int = 200_000
    """mixtures that pass the filter, of which the images are chosen"""
    autoencoder_epochs: int = 40
    """passes of the autoencoder over MNIST"""
    networks: int = 5
    """LeNets of the ensemble"""
    network_epochs: int = 8
    """passes of each over MNIST"""
    most_information: float = 0.05
    """mutual information, in nats, from which on a mixture is left out"""
    least_entropy: float = 0.05
    """entropy, in nats, below which a mixture is left out"""
    seed: int = 0
    """of all randomness"""

    def __post_init__(self) -> None:
        counts = ("images", "kept", "autoencoder_epochs", "networks", "network_epochs")
        check_ranges(self, **{name: whole(2 if name == "networks" else 1) for name in counts})
        check_ranges(self, most_information=above(0), least_entropy=at_least(0))


class Autoencoder(nn.Module):
    """The variational autoencoder of the recipe: 784-512-256 to a Gaussian code of 32, and back."""

    def __init__(self) -> None:
        super().__init__()
        pixels = SIDE * SIDE
        self.encoder = nn.Sequential(nn.Linear(pixels, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(256, CODE), nn.Linear(256, CODE)
        self.decoder = nn.Sequential(
            nn.Linear(CODE, 256), nn.ReLU(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, pixels)
        )

    def code(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the codes (N, 32) of images (N, 784) in units of MNIST's spread."""
        hidden = self.encoder(images)
        return self.mean(hidden), self.log_variance(hidden)

    def loss(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """The negative bound of Kingma & Welling (2014), per image, for pixels (N, 784) on the scale 0..1."""
        mean, log_variance = self.code((pixels - MEAN) / STD)
        logits = self.decoder(mean + noise * (0.5 * log_variance).exp())
        kl = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum()
        return (F.binary_cross_entropy_with_logits(logits, pixels, reduction="sum") + kl) / len(pixels)

    def decode(self, codes: Tensor) -> Tensor:
        """(N, 784) pixels in units of MNIST's spread."""
        return (self.decoder(codes).sigmoid() - MEAN) / STD


class LeNet(nn.Module):
    """LeCun et al. (1998), as in the recipe: two convolutions, then 256-120-84-10."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.head = nn.Sequential(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, 10) of images (N, 1, 28, 28) in units of MNIST's spread."""
        x = F.relu(F.max_pool2d(self.first(images), 2))
        return self.head(F.relu(F.max_pool2d(self.second(x), 2)).flatten(1))


class Mixtures(NamedTuple):
    """Images decoded from mixtures of 2 to 4 codes of MNIST digits, with the ensemble's predictions for them."""

    images: Tensor  # (N, 28, 28) bytes
    entropy: Tensor  # (N,), in nats
    information: Tensor  # (N,), in nats
    probs: Tensor  # (N, 10), of the ensemble


def make(
    folder: Path, recipe: Recipe | None = None, reporter: Reporter | None = None, source: DataSource = MNIST
) -> dict[str, Any]:
    """Make the set from MNIST and write it to a data folder; returns facts about what was kept."""
    recipe, reporter = recipe or Recipe(), reporter or Silent()
    images, labels = read("train", source)
    autoencoder = train_autoencoder(images.flatten(1), recipe, reporter)
    ensemble = train_ensemble(Data(_standard(images), labels), source, recipe, reporter)
    found = filtered(autoencoder, ensemble, images.flatten(1), recipe, reporter)
    chosen = evened(found.entropy, recipe)
    order = chosen[torch.randperm(len(chosen), generator=generator(recipe.seed, "ambiguous", "order"))][: recipe.images]
    facts = {"format": FORMAT, "recipe": asdict(recipe), **summary(found, order, ensemble)}
    half = len(order) // 2
    for part, index in zip(PARTS, (order[:half], order[half:]), strict=True):
        drawn = torch.multinomial(
            found.probs[index], 10, replacement=True, generator=generator(recipe.seed, "ambiguous", "labels", part)
        )
        kept = {name: value[index] for name, value in found._asdict().items()}
        write_tensors(folder / file_of(part), {**kept, "labels": drawn}, facts)
    return facts


def train_autoencoder(pixels: Tensor, recipe: Recipe, reporter: Reporter) -> Autoencoder:
    """The autoencoder after Adam with batches of 128, the rate falling to a fifth at 1/3, 2/3 and 7/8 of the epochs."""
    with stream(recipe.seed, "ambiguous", "autoencoder"):
        model = Autoencoder()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    drops = [round(share * recipe.autoencoder_epochs) for share in (1 / 3, 2 / 3, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, drops, gamma=0.2)
    for epoch in range(recipe.autoencoder_epochs):
        source = generator(recipe.seed, "ambiguous", "autoencoder", epoch)
        for index in torch.randperm(len(pixels), generator=source).split(128):
            loss = model.loss(pixels[index], torch.randn(len(index), CODE, generator=source))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        schedule.step()
        reporter.update("autoencoder", epoch + 1, recipe.autoencoder_epochs, f"loss {loss.item():.1f}")
    return model.eval()


def train_ensemble(data: Data, source: DataSource, recipe: Recipe, reporter: Reporter) -> Posterior:
    """LeNets on MNIST; of each the epoch of best test log-likelihood is kept, as the recipe does."""
    images, labels = read("t10k", source)
    problem = Problem(
        model=LeNet,
        likelihood=Categorical(),
        data=as_batches(data, "train"),
        validation=as_batches(Data(_standard(images), labels), "validation"),
        training=Training(
            epochs=recipe.network_epochs, batch_size=128, lr=1e-3, schedule="constant", clip=1e9, patience=0
        ),
        seed=recipe.seed,
        strategy="looped",
        reporter=reporter,
    )
    return Ensemble(recipe.networks).fit(problem)


def _standard(images: Tensor) -> Tensor:
    return ((images - MEAN) / STD).unsqueeze(1)


@torch.no_grad()
def filtered(
    autoencoder: Autoencoder, ensemble: Posterior, pixels: Tensor, recipe: Recipe, reporter: Reporter
) -> Mixtures:
    """Mixtures of codes that pass the filter, until there are enough."""
    codes = autoencoder.code((pixels - MEAN) / STD)[0]
    decoded = torch.cat([autoencoder.decode(part) for part in codes.split(CHUNK)])
    spread, centre = torch.std_mean(decoded)
    kept: list[Mixtures] = []
    count, tried = 0, 0
    for mixed in mixtures(codes, generator(recipe.seed, "ambiguous", "mixtures")):
        calibrated = ((autoencoder.decode(mixed) - centre) / spread) * STD + MEAN
        images = (1.20 * calibrated - 0.15).clamp(0, 1).unflatten(1, (SIDE, SIDE))
        images = (255 * images).round()  # as they will be stored
        predictive = ensemble.predict(_standard(images / 255))
        assert isinstance(predictive, CategoricalPredictive)
        total, information = predictive.total, predictive.epistemic
        passed = (information <= recipe.most_information) & (total >= recipe.least_entropy)
        found = Mixtures(images.to(torch.uint8), total, information, predictive.probs)
        kept.append(Mixtures(*(value[passed] for value in found)))
        count, tried = count + int(passed.sum()), tried + len(passed)
        reporter.update("mixtures", min(count, recipe.kept), recipe.kept, f"{count} of {tried} kept")
        if count >= recipe.kept:
            break
    return Mixtures(*(torch.cat(parts)[: recipe.kept] for parts in zip(*kept, strict=True)))


def mixtures(codes: Tensor, source: torch.Generator) -> Iterator[Tensor]:
    """Codes (N, 32) of mixtures without end: 2, 3 or 4 digits with weights uniform on the simplex, 64 of each group."""
    groups = CHUNK // MIXTURES
    while True:
        for digits in MIXED:
            index = torch.randint(len(codes), (groups, digits), generator=source)
            cuts = torch.rand(groups, MIXTURES, digits - 1, generator=source).sort(-1).values
            ends = F.pad(F.pad(cuts, (1, 0)), (0, 1), value=1.0)
            weights = ends.diff(dim=-1)  # (groups, 64, digits)
            yield (weights @ codes[index]).flatten(0, 1)


def evened(entropy: Tensor, recipe: Recipe) -> Tensor:
    """Indices of the images to take: of every bin of entropies a number as its count to the power .2, inside a bin
    those nearest to uniform draws of the entropy, each once. A bin that has fewer gives what it has."""
    edges = torch.linspace(LOW, HIGH, BINS + 1, dtype=entropy.dtype)
    place = torch.bucketize(entropy.contiguous(), edges) - 1
    counts = torch.stack([(place == i).sum() for i in range(BINS)]).double()
    wanted = _shares(counts, recipe.images)
    source = generator(recipe.seed, "ambiguous", "evened")
    chosen = []
    for i, number in enumerate(wanted):
        members = (place == i).nonzero().flatten()
        members = members[entropy[members].argsort()]
        if number >= len(members):
            chosen.append(members)
            continue
        drawn = edges[i] + (edges[i + 1] - edges[i]) * torch.rand(number, generator=source, dtype=edges.dtype)
        free = torch.ones(len(members), dtype=torch.bool)
        nearest = torch.searchsorted(entropy[members].contiguous(), drawn).clamp(max=len(members) - 1)
        for j in nearest.tolist():
            where = free.nonzero().flatten()
            free[where[(where - j).abs().argmin()]] = False
        chosen.append(members[~free])
    return torch.cat(chosen)


def _shares(counts: Tensor, total: int) -> list[int]:
    """How many of each bin: proportional to the count to the power .2, where a bin has as many; `total` in all."""
    wanted = torch.zeros_like(counts)
    while True:  # what a thin bin cannot give is shared among the others
        open_ = (wanted < counts) & (counts > 0)
        rest = min(total, int(counts.sum())) - wanted.sum()
        if rest < 1 or not open_.any():
            break
        weight = torch.where(open_, counts.pow(EVENING), 0.0)
        step = (rest * weight / weight.sum()).clamp(min=0)
        grown = torch.minimum(counts, wanted + step)
        if (grown - wanted).sum() < 1:
            break
        wanted = grown
    return wanted.round().long().tolist()


def summary(found: Mixtures, chosen: Tensor, ensemble: Posterior) -> dict[str, Any]:
    """What was kept: counts, and histograms of entropy and mutual information of the images that were chosen."""
    facts: dict[str, Any] = {"passed": len(found.entropy), "images": len(chosen)}
    facts["network_epochs"] = ensemble.facts["best_epoch"]
    for name, values, high in (("entropy", found.entropy, HIGH), ("information", found.information, LOW)):
        kept = values[chosen].float().clamp(0, high)
        edges = torch.linspace(0, high, 17)
        facts[name] = {
            "edges": [round(edge, 4) for edge in edges.tolist()],
            "counts": torch.histogram(kept, edges)[0].int().tolist(),
            "least": values[chosen].min().item(),
            "most": values[chosen].max().item(),
            "mean": values[chosen].mean().item(),
        }
    return facts


def told(facts: dict[str, Any]) -> str:
    """The facts of a made set as text: what was kept, and histograms of entropy and mutual information."""
    lines = [f"{facts['images']} images of {facts['passed']} mixtures that passed the filter"]
    for name, unit in (("entropy", "H"), ("information", "I")):
        found = facts[name]
        lines.append(
            f"{unit}: {found['least']:.4f} to {found['most']:.4f}, mean {found['mean']:.4f} nats; images by {name}:"
        )
        most = max(found["counts"])
        for low, high, count in zip(found["edges"], found["edges"][1:], found["counts"], strict=False):
            lines.append(f"  {low:6.3f} to {high:6.3f} {count:6d} {'#' * round(40 * count / most)}")
    return "\n".join(lines)
