"""What talks to Kubernetes: the pod-deletion cost of a predictor, and ``carousel scaler``. Nothing here is imported by
``carousel serve`` unless it is asked for, and nothing here imports torch or kserve.

**Pod-deletion cost** (``deletion_cost``): ``carousel serve --pod-deletion-cost`` (``CAROUSEL_POD_DELETION_COST=true``)
keeps the annotation ``controller.kubernetes.io/pod-deletion-cost`` of its own pod at the tokens it holds, running and
waiting, so that a scale-in takes the idlest first. Wants: ``POD_NAME`` and ``POD_NAMESPACE`` from the downward API
(``metadata.name``, ``metadata.namespace``; without them the host name and the token's namespace), a mounted service
account token, and a Role with ``pods: [patch]``. Without them one error in the log, and serving goes on.

**Scaler** (``scaler``): ``carousel scaler --pod-selector app=x`` is an external scaler for KEDA, trigger type
``external`` or ``external-push``, ``scalerAddress: SERVICE.NAMESPACE.svc:9095``. Any number of replicas; each watches
all pods itself.

=======  =====================================================  ==========================================
port     flag                                                   what
=======  =====================================================  ==========================================
9095     ``--scaler-port``, ``CAROUSEL_SCALER_PORT``            gRPC: externalscaler.ExternalScaler, grpc.health.v1
9096     ``--admin-port``, ``CAROUSEL_ADMIN_PORT``              HTTP: /livez /readyz /metrics /state, POST /activate
0 (off)  ``--activator-port``, ``CAROUSEL_ACTIVATOR_PORT``      HTTP proxy that holds requests until a pod is ready
=======  =====================================================  ==========================================

Which pods: ``--pod-selector LABELS`` (``CAROUSEL_POD_SELECTOR``; through the API: Role with ``pods: [list, watch]``) or
``--pod-dns NAME`` (``CAROUSEL_POD_DNS``; a headless Service, no RBAC, no token), one of the two;
``--pod-namespace`` (default: the token's), ``--pod-port`` (8080), ``--pod-tls-ca FILE`` (pods that serve TLS).
The signal: ``--scale-on queue-seconds|requests|tokens``, ``--target-wait-seconds``, ``--target-requests``,
``--target-tokens``, ``--target-occupancy``, each a ``CAROUSEL_*`` variable; the trigger's metadata may override them:
``scaleOn``, ``targetWaitSeconds``, ``targetRequests``, ``targetTokens``, ``targetOccupancy``. Unknown keys are refused.
Time: ``--interval-seconds``, ``--stale-seconds``, ``--scale-in-seconds``, ``--idle-seconds``.
From zero: ``--activator-max-requests``, ``--activator-max-bytes``, ``--activator-wait-seconds``; with 2 replicas
``--peers-dns NAME`` (``CAROUSEL_PEERS_DNS``), the scaler's own headless Service with ``publishNotReadyAddresses``, so
that what one holds the other reports too. Also ``--host`` (``CAROUSEL_HOST``, as in ``serve``), ``--log-level``,
``--log-format``, ``--api-server URL`` (default: the cluster's own; for ``kubectl proxy`` http://127.0.0.1:8001).
Other ``CAROUSEL_*`` variables of ``carousel serve``, such as the image's, are let be.

**Simulator** (``simulate``): ``carousel autoscale-sim`` replays arrivals against a modelled HPA; docs/autoscaling.md.
"""
