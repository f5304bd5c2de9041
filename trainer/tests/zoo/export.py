"""Exports the models of the zoo and records how PyTorch trains them.

Writes NAME.onnx into default/ and earlier/, one folder per exporter of PyTorch, and losses.json: the losses of 20 steps of
SGD (rate 0.05, one batch of 8 rows). The test `zoo` of the trainer trains the same files on the same rows. For models in
PyTorch's mode for training, losses64.json has those of 8 steps in float64.

Recorded with PyTorch 2.15 and onnxscript as pip resolves it: python export.py [NAME ...]
"""

import json
import logging
import pathlib
import sys
import warnings

import layers
import networks
import onnx
import torch
import torch.nn.functional as F
from models import MODELS, ROWS, inputs, labels, values

STEPS = 20
STEPS_64 = 8
RATE = 0.05
# What the default exporter says about the module of a node, the rewriting rules, and the call in PyTorch.
NODE_KEYS = {
    "pkg.torch.onnx.class_hierarchy", "pkg.torch.onnx.name_scopes", "pkg.onnxscript.rewriter.rule_name",
    "pkg.torch.onnx.fx_node",
}  # fmt: skip
HERE = pathlib.Path(__file__).parent


def export(name, exporter):
    row, module, vocabulary, train, outputs, _ = MODELS[name]
    path = HERE / exporter / f"{name}.onnx"
    path.parent.mkdir(exist_ok=True)
    arguments = inputs(3, row, vocabulary)
    given = list(row) if isinstance(row, dict) else ["x"]
    names = {"input_names": given, "output_names": outputs}
    if exporter == "default":
        batch = torch.export.Dim("batch", min=2 if train else 1, max=1024)
        shapes = tuple({0: batch} for _ in given)
        # The optimization folds batch normalizations as if the model were not in training.
        torch.onnx.export(
            module, arguments, path, **names, dynamo=True, dynamic_shapes=shapes, verbose=False,
            external_data=False, optimize=not train,
        )
    else:
        mode = torch.onnx.TrainingMode.TRAINING if train else torch.onnx.TrainingMode.EVAL
        axes = {tensor: {0: "batch"} for tensor in given + outputs}
        torch.onnx.export(module, arguments, path, **names, dynamo=False, dynamic_axes=axes, training=mode)
    strip(path)


def strip(path):
    """Removes what is said about the source code of the nodes, and keeps their modules and calls."""
    exported = onnx.load(path)
    nodes = list(exported.graph.node) + [node for function in exported.functions for node in function.node]
    for node in nodes:
        kept = [entry for entry in node.metadata_props if entry.key in NODE_KEYS]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.doc_string = ""
    onnx.save(exported, path)


def trained(name, steps=STEPS, kind=torch.float32):
    """The losses of a model, computed in numbers of `kind`."""
    row, module, vocabulary, train, _, loss_of = MODELS[name]
    module = module.train(train).to(kind)
    x = tuple(part.to(kind) if part.is_floating_point() else part for part in inputs(ROWS, row, vocabulary))

    def trained_output():
        found = module(*x)
        return found[0] if isinstance(found, tuple) else found

    if loss_of == "mse":
        shape = list(trained_output().shape[1:])
        y, compare = values(ROWS, shape, None).to(kind), F.mse_loss
    else:
        y, compare = labels(trained_output().shape[-1]) if not train else labels(4), F.cross_entropy
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = compare(trained_output(), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    module.float()
    return losses


def main():
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    wanted = set(sys.argv[1:])
    groups = [
        layers.activations, layers.convolutions, layers.pools_and_resizing, layers.normalizations, layers.recurrent,
        networks.attention, layers.parameters, layers.shapes, layers.arithmetic, networks.networks,
        networks.several_inputs, networks.restored, networks.reported, networks.positions, networks.selections,
        networks.found_later,
    ]  # fmt: skip
    for seed, group in enumerate(groups):
        torch.manual_seed(seed)
        group()
    recorded, exact = HERE / "losses.json", HERE / "losses64.json"
    losses, losses_64 = (json.loads(file.read_text()) if file.exists() else {} for file in (recorded, exact))
    for name, (_, module, _, train, _, _) in MODELS.items():
        if wanted and name not in wanted:
            continue
        module.train(train)
        state = {key: value.clone() for key, value in module.state_dict().items()}
        for exporter in ["default", "earlier"]:
            module.load_state_dict(state)
            try:
                export(name, exporter)
            except Exception as error:
                print(f"{exporter} {name}: {str(error).splitlines()[0][:200]}")
        module.load_state_dict(state)
        losses[name] = trained(name)
        if train:
            module.load_state_dict(state)
            losses_64[name] = trained(name, STEPS_64, torch.float64)
    recorded.write_text(json.dumps(losses, indent=0, sort_keys=True) + "\n")
    exact.write_text(json.dumps(losses_64, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
