"""ONNX files to TensorRT engines: `build.build_plan` is the door.

    backend.py    the module (`tensorrt` or `tensorrt_rtx`) and what it can do
    log.py        the library's one logger, and its noise on stderr
    progress.py   progress and cancelling
    profiles.py   optimisation profiles by symbol
    targets.py    GPU architectures of an ahead-of-time build
    graph.py      an ONNX file: read, checked, its inputs, its attentions
    lint.py       what TensorRT's parser refuses or drops
    messages.py   the library's texts turned into what is wrong and what to do
    plan.py       what the bytes of a plan tell without a GPU
    verdict.py    fused or not, per attention, and why not
    options.py    what to build
    build.py      the build itself
    isolated.py   the build in a child process, since TensorRT may crash
    worker.py     that process

Importing this package loads neither TensorRT nor onnx.
"""
