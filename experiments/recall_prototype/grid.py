RATES = [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
SEEDS = [0, 1]
STEPS = 2000
VARIANTS = {
    "exp log": dict(),
    "exp log adam": dict(opt="adam"),
    "norm t1 log": dict(feat="norm", temp=1.0),
    "norm t3 real": dict(feat="norm", temp=3.0, real=1),
    "linear (elu real)": dict(feat="elu", real=1),
    "softmax": dict(feat="softmax"),
    "exp real": dict(real=1),
    "lsm t3 log": dict(feat="lsm", temp=3.0),
    "lsm t3 real": dict(feat="lsm", temp=3.0, real=1),
    "exp x3 log": dict(scale=3.0),
    "norm t3 log": dict(feat="norm", temp=3.0),
    "lsmk t1 log": dict(feat="lsmk", temp=1.0),
    "exp log nogate": dict(gate=0),
    "scale t3 real": dict(feat="scale", temp=3.0, real=1),
    "norm t3 real adam": dict(feat="norm", temp=3.0, real=1, opt="adam"),
    "softplus real": dict(feat="softplus", real=1),
    "exp real 1x64": dict(real=1, heads=1, dk=32, dv=32),
    "norm t2 real nogate": dict(feat="norm", temp=2.0, real=1, gate=0),
}
