"""scikit-learn and ONNX Runtime's quantization: models whose rows depend on each other, and others that they do not."""
import os
import sys

import numpy as np
from onnxruntime import quantization
from skl2onnx import to_onnx
from sklearn.datasets import load_iris
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, StandardScaler

folder = sys.argv[1]
x, y = load_iris(return_X_y=True)
x = x.astype(np.float32)


def learned(name, model):
    options = {id(model): {"zipmap": False}} if hasattr(model, "predict_proba") else None
    made = to_onnx(model.fit(x, y), x[:1], options=options, target_opset=17)
    path = f"{folder}/{name}.onnx"
    with open(path, "wb") as file:
        file.write(made.SerializeToString())
    return path


class Samples(quantization.CalibrationDataReader):
    def __init__(self):
        rng = np.random.default_rng(5)
        self.rows = iter([{"x": rng.normal(size=(8, 16)).astype(np.float32)} for _ in range(4)])

    def get_next(self):
        return next(self.rows, None)


learned("independent_forest", RandomForestClassifier(n_estimators=20, random_state=1))
learned("independent_boosted", GradientBoostingClassifier(n_estimators=5, random_state=1))
learned("independent_logistic", make_pipeline(StandardScaler(), LogisticRegression()))
learned("independent_linear", make_pipeline(MinMaxScaler(), Normalizer(), LinearRegression()))
network = learned("independent_network", make_pipeline(StandardScaler(), MLPClassifier((16,), max_iter=50, random_state=1)))
mlp = f"{folder}/mlp.onnx"
# The ranges of what comes in are taken over the whole batch.
quantization.quantize_dynamic(network, f"{folder}/tool_dynamic_network.onnx")
quantization.quantize_dynamic(mlp, f"{folder}/tool_dynamic_mlp.onnx")
quantization.quantize_dynamic(mlp, f"{folder}/tool_dynamic_per_channel.onnx", per_channel=True)
for form in (quantization.QuantFormat.QDQ, quantization.QuantFormat.QOperator):
    path = f"{folder}/independent_static_{form.name.lower()}.onnx"
    quantization.quantize_static(mlp, path, Samples(), quant_format=form)
os.rename(mlp, f"{folder}/independent_mlp.onnx")
print("made by scikit-learn and ONNX Runtime")
