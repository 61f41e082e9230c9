"""The isometry study: what initialisations do to signals and gradients, beside what a paper says they do.

DI-NAS argues that orthogonal weights make every candidate a dynamical isometry (phi(J J^T) = 1, varphi(J J^T) = 0), and
that the candidates of a layer are therefore compared fairly. Its theory is about fully connected tanh layers; its
blocks have depthwise convolutions, BatchNorm and ReLU6. The study measures which parts hold.
"""
