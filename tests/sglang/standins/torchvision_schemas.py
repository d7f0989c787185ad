"""Declares the two operators that torchvision registers Python code for: its own library of them is built
for CUDA and does not load beside a CPU build of torch. Imported at the interpreter's start (by a .pth)."""

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")
LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
