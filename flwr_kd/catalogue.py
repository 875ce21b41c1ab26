"""Names of the data sets, models and partitions that come with the package, each with one line about it.

This module needs neither PyTorch nor NumPy, so that a program can list the names without them. Tests hold the names
together with the code that loads, builds and divides.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["DATASETS", "FEATURE_LAYERS", "MODELS", "MODEL_FORMS", "PARTITIONS", "PREDICTORS"]

DATASETS: Mapping[str, str] = MappingProxyType(
    {
        "digits": "images 1×8×8, 10 classes: 1,797 digits of scikit-learn, no download",
        "fashion-mnist": "images 1×28×28, 10 classes: 70,000 pieces of clothing",
        "mnist": "images 1×28×28, 10 classes: 70,000 digits",
        "mnist-5k": "images 1×28×28, 10 classes: 5,000 digits of MNIST, no download, needs flwr-kd[mnist-5k]",
        "cifar10": "images 3×32×32, 10 classes: 60,000 photographs",
        "cifar100": "images 3×32×32, 100 classes: 60,000 photographs",
        "svhn": "images 3×32×32, 10 classes: 99,289 house numbers",
        "emnist-balanced": "images 1×28×28, 47 classes: 131,600 letters and digits",
        "emnist-byclass": "images 1×28×28, 62 classes: 814,255 letters and digits",
        "emnist-letters": "images 1×28×28, 26 classes: 145,600 letters, upper and lower case together",
        "emnist-digits": "images 1×28×28, 10 classes: 280,000 digits",
        "cinic10": "images 3×32×32, 10 classes: 180,000 photographs, from a folder of files",
        "tiny-imagenet": "images 3×64×64, 200 classes: 110,000 photographs, from its folder",
        "chexpert": "images 1×64×64, 14 classes: chest radiographs with one finding each, from its folder",
        "chexpert-multilabel": "images 1×64×64, 14 classes: the same files, each radiograph with all its findings",
        "20newsgroups": "texts as TF-IDF of 5,000 words, 20 classes: 18,846 messages",
        "ag-news": "texts as TF-IDF of 1,024 words, 4 classes: 127,600 news",
        "sst2": "texts as TF-IDF of 1,024 words, 2 classes: 68,221 sentences",
        "20newsgroups-tokens": "20newsgroups as 200 token ids per text, for bilstm",
        "ag-news-tokens": "ag-news as 64 token ids per text, for bilstm",
        "sst2-tokens": "sst2 as 64 token ids per text, for bilstm",
        "letters": "16 numbers per letter, 26 classes: 20,000 rows, no download, needs flwr-kd[letters]",
        "unicauca75": "80 numbers of a network flow, 75 applications: up to 3,577,296 flows, from its csv file",
        "unicauca141": "44 numbers of a network flow, 141 services: up to 2,704,839 flows, from its csv file",
        "csv:PATH": "a table of numbers with a column of labels, from a csv file",
        "hf:NAME-or-PATH": "images, numbers or tensors, of Hugging Face's hub or from files, needs flwr-kd[hf]",
        "package.module:function": "your own, as flwr_kd.data.Samples",
    }
)
"""Names that :func:`flwr_kd.data.load` accepts."""

MODELS: Mapping[str, str] = MappingProxyType(
    {
        "alexnet": "images from 8×8: AlexNet with small kernels, 512 features",
        "bilstm": "token ids: two bidirectional LSTMs and five layers, 64 features",
        "cnn": "images from 4×4: two 5×5 convolutions (McMahan et al. 2017), 512 features",
        "lenet": "images from 4×4: LeNet-5 with ReLU and max pooling, 84 features",
        "mlp": "any numbers: a hidden layer of 200, 64 features",
        "mlp-bn": "any numbers: a hidden layer of 200 with BatchNorm, 64 features",
        "mlp4": "any numbers: three hidden layers of 200, 200 features",
        "resnet10": "images from 4×4: FedDKC's, split after the stem, 4 blocks in the predictor",
        "resnet10-pooled": "images from 4×4: resnet10 with max pooling, whose features are a quarter as large",
        "resnet12": "images from 4×4: FedDKC's, split after the stem, 5 blocks in the predictor",
        "resnet12-pooled": "images from 4×4: resnet12 with max pooling, whose features are a quarter as large",
        "resnet18": "images from 8×8: torchvision's, 64 features of both signs",
        "resnet2": "images from 4×4: FedDKC's, split after the stem, no block in the predictor",
        "resnet2-pooled": "images from 4×4: resnet2 with max pooling, whose features are a quarter as large",
        "resnet32": "images from 4×4: ResNet for CIFAR (He et al. 2016), 3 stages of 5 blocks, 64 features",
        "resnet4": "images from 4×4: FedDKC's, split after the stem, 1 block in the predictor",
        "resnet4-pooled": "images from 4×4: resnet4 with max pooling, whose features are a quarter as large",
        "resnet6": "images from 4×4: FedDKC's, split after the stem, 2 blocks in the predictor",
        "resnet6-pooled": "images from 4×4: resnet6 with max pooling, whose features are a quarter as large",
        "resnet8": "images from 4×4: ResNet for CIFAR (He et al. 2016), 3 stages of 1 block, 64 features",
        "shufflenet": "images from 8×8: torchvision's ShuffleNetV2 x1.0, 32 features of both signs",
    }
)
"""Names that :func:`flwr_kd.models.build_model` accepts."""

MODEL_FORMS: Mapping[str, str] = MappingProxyType(
    {
        "torchvision:NAME": "a classifier of torchvision, with random weights",
        "timm:NAME": "a classifier of timm, with random weights; needs timm",
        "package.module:function": "your own, which gets input_shape, num_classes, seed where it names them",
    }
)
"""Forms of models of other packages; see :mod:`flwr_kd.models.named`."""

FEATURE_LAYERS: Mapping[str, str] = MappingProxyType(
    {
        "relu": "a Linear and a ReLU: features are never negative",
        "linear": "a Linear: features have both signs",
        "batchnorm": "a Linear and a BatchNorm without scale and shift: features have mean 0 and variance 1",
    }
)
"""How the extractor of a model of :func:`flwr_kd.models.build_model` may end."""

PREDICTORS: Mapping[str, str] = MappingProxyType(
    {
        "bottleneck": "bottleneck blocks: 167,306 parameters for 10 classes, as FedDKC's paper prints",
        "basic": "the stages of ResNet20: 272,010 parameters",
    }
)
"""Kinds of :func:`flwr_kd.models.build_predictor`."""

PARTITIONS: Mapping[str, str] = MappingProxyType(
    {
        "iid": "random parts of equal size",
        "dirichlet:ALPHA": "each class divided by shares from Dirichlet(ALPHA); sizes differ",
        "inner-dirichlet:ALPHA": "parts of equal size, each client's class mix from Dirichlet(ALPHA)",
        "pathological:K": "samples of exactly K classes per client; sizes differ",
        "ktpfl-1[:MANY]": "two groups of clients with opposite class mixes, 450, MANY or max per frequent class",
        "natural:COLUMN": "a client for each value of a column, such as a person, of a data set that has some",
        "ktpfl-2[:EACH]": "two random classes per client, 300 (or EACH, or max) samples of each",
    }
)
"""Forms that :func:`flwr_kd.data.partition` accepts."""
