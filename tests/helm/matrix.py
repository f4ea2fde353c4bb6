"""Values that switch every part of the chart on, by name; each must give a sound set of objects."""

from __future__ import annotations

from typing import Any

MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "three pods": {"replicas": 3},
    "nothing running": {"replicas": 0},
    "inferenceservice": {"mode": "inferenceservice"},
    "inferenceservice with pods": {"mode": "inferenceservice", "replicas": 2, "podLabels": {"team": "a"}},
    "hpa": {"autoscaling": {"type": "hpa", "maxReplicas": 6}},
    "hpa on cpu": {
        "autoscaling": {
            "type": "hpa",
            "hpa": {
                "metrics": [
                    {
                        "type": "Resource",
                        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}},
                    }
                ]
            },
        }
    },
    "hpa of an inferenceservice": {"mode": "inferenceservice", "autoscaling": {"type": "hpa"}},
    "hpa on requests": {"autoscaling": {"type": "hpa", "target": {"scaleOn": "requests"}}},
    "keda prometheus": {
        "autoscaling": {
            "type": "keda",
            "keda": {
                "trigger": "prometheus",
                "prometheus": {"serverAddress": "http://prometheus:9090", "authenticationRef": "prometheus"},
            },
        }
    },
    "keda prometheus on tokens": {
        "autoscaling": {
            "type": "keda",
            "target": {"scaleOn": "tokens"},
            "keda": {"trigger": "prometheus", "prometheus": {"serverAddress": "http://prometheus:9090"}},
        }
    },
    "keda metrics-api": {"autoscaling": {"type": "keda", "keda": {"trigger": "metrics-api"}}},
    "keda metrics-api over TLS": {
        "tls": {"secretName": "cert"},
        "autoscaling": {"type": "keda", "target": {"scaleOn": "tokens"}, "keda": {"trigger": "metrics-api"}},
    },
    "keda external": {"autoscaling": {"type": "keda", "keda": {"trigger": "external", "restoreReplicas": True}}},
    "keda external-push from zero": {
        "autoscaling": {"type": "keda", "minReplicas": 0},
        "scaler": {"activator": {"enabled": True}, "replicas": 1},
    },
    "scaler by dns, TLS, policies": {
        "autoscaling": {"type": "keda"},
        "scaler": {"discovery": "dns", "settings": {"interval_seconds": 1, "max_request_bytes": "8MiB"}},
        "tls": {"secretName": "cert", "caKey": "tls.crt"},
        "networkPolicy": {
            "enabled": True,
            "from": [{"namespaceSelector": {}}],
            "scalerFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}],
            "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
        },
    },
    "scaler of an inferenceservice": {
        "mode": "inferenceservice",
        "autoscaling": {"type": "keda"},
        "networkPolicy": {"enabled": True, "allowDownloads": False},
        "settings": {"pod_deletion_cost": True},
    },
    "load test": {"loadTest": {"enabled": True}},
    "load test with a key, over TLS": {
        "loadTest": {"enabled": True, "args": ["--protocol=infer"], "apiKeySecret": {"name": "load-key"}},
        "apiKeys": {"keys": ["0123456789abcdef=gold"]},
        "tls": {"secretName": "cert"},
        "networkPolicy": {"enabled": True, "from": [{"podSelector": {}}]},
    },
    "deletion cost": {"settings": {"pod_deletion_cost": True}, "networkPolicy": {"enabled": True}},
    "an account of one's own": {"serviceAccount": {"create": False, "name": "mine"}},
    "the default account": {"serviceAccount": {"create": False}},
    "GPU": {"gpu": {"enabled": True}, "runtimeClassName": "nvidia", "priorityClassName": "high"},
    "MIG": {
        "mode": "inferenceservice",
        "gpu": {"enabled": True, "resource": "nvidia.com/mig-1g.10gb"},
        "tolerations": [{"key": "models", "operator": "Exists"}],
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "updateStrategy": {"maxSurge": 0, "maxUnavailable": 1},
    },
    "placement": {
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "topologySpread": [{"topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}],
        "updateStrategy": {"maxSurge": "50%", "maxUnavailable": "25%"},
        "imagePullSecrets": [{"name": "registry"}],
        "commonLabels": {"team": "a"},
    },
    "no spread, no budget": {"topologySpread": [], "podDisruptionBudget": {"enabled": False}},
    "a model in a claim": {"modelVolume": {"claimName": "models", "subPath": "qwen"}},
    "cache of the chart": {"cache": {"kind": "claim", "claim": {"storageClassName": "fast", "keep": True}}},
    "the model in the image": {"image": {"tag": "demo"}, "cache": {"kind": "none"}},
    "cache of one's own": {"cache": {"kind": "existingClaim", "existingClaim": "cache", "readOnly": True}},
    "secrets of one's own": {
        "apiKeys": {"existingSecret": "keys"},
        "huggingFace": {"existingSecret": "hub", "key": "HF"},
        "s3": {"existingSecret": "s3", "endpoint": "http://minio:9000", "region": "eu-1"},
    },
    "secrets of the chart": {
        "apiKeys": {"keys": ["0123456789", "abcdefghij=gold"]},
        "huggingFace": {"token": "hf_x"},
        "s3": {"accessKeyId": "id", "secretAccessKey": "secret"},
    },
    "tenants of the chart": {
        "tenants": {"policy": {"default": {"requests_per_minute": 60}, "tenants": {"gold": {"weight": 4}}}},
        "usageLog": {"kind": "emptyDir", "sizeLimit": "2Gi"},
        "settings": {"service_account_audience": "carousel", "policy": "fair"},
    },
    "tenants of one's own": {
        "mode": "inferenceservice",
        "tenants": {"existingConfigMap": "tenants"},
        "usageLog": {"kind": "existingClaim", "existingClaim": "usage"},
    },
    "TLS": {"tls": {"secretName": "cert"}, "metrics": {"scrape": "podmonitor"}, "service": {"type": "LoadBalancer"}},
    "client certificates": {
        "tls": {"secretName": "cert", "clientCertificates": True, "clientSecretName": "probe"},
        "metrics": {"scrape": "podmonitor", "labels": {"release": "prometheus"}},
    },
    "no gRPC, other ports": {
        "settings": {"grpc": False, "http_port": 9000},
        "service": {"port": 8000, "type": "NodePort", "annotations": {"a": "b"}},
        "metrics": {"scrape": "none"},
    },
    "preStop": {"shutdown": {"preStopSeconds": 7}, "settings": {"shutdown_delay_seconds": 0, "drain_seconds": 12.5}},
    "monitoring": {
        "metrics": {"scrape": "podmonitor"},
        "alerts": {"enabled": True, "labels": {"team": "a"}, "runbookURL": "https://example.com/runbook"},
        "dashboard": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
    },
    "monitoring of an inferenceservice": {
        "mode": "inferenceservice",
        "alerts": {"enabled": True, "slo": {"ttftSeconds": 1}},
    },
    "OpenShift": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
    "extras": {
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}, {"name": "CAROUSEL_FAULTS", "value": "on"}],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
    },
    "another name": {"fullnameOverride": "qwen", "image": {"digest": f"sha256:{'a' * 64}", "pullPolicy": "Never"}},
}  # fmt: skip
