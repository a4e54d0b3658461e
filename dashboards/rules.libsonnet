# Printed by `vllm-watch render` from dashboards/mixin.py. Change the source, print again, commit both.
{
 "alerts": [
  {
   "name": "vllm-critical-engine",
   "rules": [
    {
     "alert": "VLLMEngineDown",
     "expr": "    group by (cluster, namespace, job) (\n        up{job=~\"vllm.*\"}\n      unless on (cluster, instance)\n        (\n            label_replace(\n                max by (cluster, address) (vllm_watch_gateway_engine_state{state=\"scaling\"})\n              or\n                max by (cluster, address) (vllm_watch_engine_state{state=\"scaling\"}),\n              \"instance\",\n              \"$1\",\n              \"address\",\n              \"(.+)\"\n            )\n          ==\n            1\n        )\n    )\n  unless\n    group by (cluster, namespace, job) (up{job=~\"vllm.*\"} == 1)\nand\n  group by (cluster, namespace, job) (\n    max_over_time(up{job=~\"vllm.*\"}[1h]) == 1 or last_over_time(up{job=~\"vllm.*\"}[1h] offset 10m)\n  )",
     "for": "1m",
     "labels": {
      "severity": "critical",
      "owner": "serving"
     },
     "annotations": {
      "summary": "vLLM down: no engine of job {{ $labels.job }} answers",
      "description": "No engine of job {{ $labels.job }} has answered Prometheus for 1 min: users get connection errors, or only the network between Prometheus and the engines is down. Check /health of an engine: if it answers, only Prometheus cannot reach it; if not, read the end of its log.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMEngineDown?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=949305"
     }
    },
    {
     "alert": "VLLMModelDown",
     "expr": "  group by (cluster, namespace, job, model_name) (\n        last_over_time(cluster_namespace_job_instance_model_name:vllm_num_requests_running:group[1d])\n      and on (cluster, namespace, job, instance)\n        up{job=~\"vllm.*\"} == 0\n    or\n          last_over_time(cluster_namespace_job_instance_model_name:vllm_num_requests_running:group[1d])\n        unless on (cluster, namespace, job, instance)\n          up{job=~\"vllm.*\"}\n      and on (cluster, namespace, job)\n        (\n            up{job=~\"vllm.*\"} == 0 and last_over_time(up{job=~\"vllm.*\"}[1h] offset 10m)\n          unless on (cluster, namespace, job, instance)\n            last_over_time(cluster_namespace_job_instance_model_name:vllm_num_requests_running:group[1d])\n        )\n  )\nunless on (cluster, namespace, model_name)\n  vllm:num_requests_running{job=~\"vllm.*\"}",
     "for": "1m",
     "labels": {
      "severity": "critical",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Model down: no engine of {{ $labels.model_name }} answers (job {{ $labels.job }})",
      "description": "No engine of job {{ $labels.job }} that served {{ $labels.model_name }} within the last day has answered for 1 min: requests for this model fail, also while other models of the job are served. Read the end of the log of its engines; until one answers, send its requests to another model (Mitigation 3).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMModelDown?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=949305"
     }
    },
    {
     "alert": "VLLMEngineFrozen",
     "expr": "    sum by (cluster, namespace, job, instance, model_name, pod) (\n      last_over_time(vllm:num_requests_running{job=~\"vllm.*\"}[1h])\n    )\n  and on (cluster, instance)\n    (\n        label_replace(\n            max by (cluster, address) (vllm_watch_gateway_engine_state{state=\"hung\"})\n          or\n            max by (cluster, address) (vllm_watch_engine_state{state=\"hung\"}),\n          \"instance\",\n          \"$1\",\n          \"address\",\n          \"(.+)\"\n        )\n      ==\n        1\n    )\nor\n              sum by (cluster, namespace, job, instance, model_name, pod) (\n                min_over_time(vllm:num_requests_running{job=~\"vllm.*\"}[4m])\n              )\n            +\n              sum by (cluster, namespace, job, instance, model_name, pod) (\n                min_over_time(vllm:num_requests_waiting{job=~\"vllm.*\"}[4m])\n              )\n          >\n            0\n        and\n              sum by (cluster, namespace, job, instance, model_name, pod) (\n                rate(vllm:generation_tokens_total{job=~\"vllm.*\"}[4m])\n              )\n            +\n              sum by (cluster, namespace, job, instance, model_name, pod) (\n                rate(vllm:prompt_tokens_total{job=~\"vllm.*\"}[4m])\n              )\n          ==\n            0\n      and\n        sum by (cluster, namespace, job, instance, model_name, pod) (\n          vllm:num_requests_running{job=~\"vllm.*\"} offset 4m\n        )\n    and\n      sum by (cluster, namespace, job, instance, model_name, pod) (\n        vllm:num_requests_running{job=~\"vllm.*\"}\n      )\n  unless on (cluster, namespace, job, instance, model_name, pod)\n    (\n        vllm:num_requests_kv_fetch_by_stage{job=~\"vllm.*\",stage=\"in_progress\"} > 0\n      unless on (cluster, namespace, job, instance, model_name, pod)\n        vllm:num_requests_running{job=~\"vllm.*\"} > 0\n    )",
     "for": "0s",
     "labels": {
      "severity": "critical",
      "owner": "serving"
     },
     "annotations": {
      "summary": "vLLM hung: {{ $labels.model_name }} on {{ $labels.instance }} makes no progress",
      "description": "{{ $labels.model_name }} on {{ $labels.instance }} makes no progress: for 30 s by the gateway, 45 s by the sidecar or 4 min by its own metrics, which last showed {{ $value | humanize }} running requests. Its /health may still return 200, so balancers keep sending to it. Save the stacks of its processes with py-spy (First five minutes, step 5), then restart this engine.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMEngineFrozen?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-fleet?viewPanel=309378"
     }
    },
    {
     "alert": "VLLMRestartLoop",
     "expr": "  (\n      sum by (cluster, namespace, job, instance, pod) (\n        changes(process_start_time_seconds{job=~\"vllm.*\"}[1h])\n      )\n    or\n      max by (cluster, namespace, job, instance, pod) (\n        resets(vllm:generation_tokens_total{job=~\"vllm.*\"}[1h])\n      )\n  )\n>=\n  3",
     "for": "0s",
     "keep_firing_for": "10m",
     "labels": {
      "severity": "critical",
      "owner": "serving"
     },
     "annotations": {
      "summary": "vLLM restart loop: {{ $labels.instance }} of job {{ $labels.job }}",
      "description": "{{ $labels.instance }} of job {{ $labels.job }} has restarted {{ $value | humanize }} times within the last hour; each restart loses its requests and its prefix cache. Read the last error in the log of the previous process: it names the cause, such as lack of memory or a failed worker.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMRestartLoop?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-fleet?viewPanel=690251"
     }
    }
   ]
  },
  {
   "name": "vllm-critical-slo",
   "rules": [
    {
     "alert": "VLLMTTFTBudgetBurn",
     "expr": "  (\n            sum_over_time(cluster_model_name:vllm_slo_ttft_bad:increase5m[1h])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_ttft_all:increase5m[1h]) > 0)\n        >\n          0.1344\n      and\n            cluster_model_name:vllm_slo_ttft_bad:increase5m\n          /\n            (cluster_model_name:vllm_slo_ttft_all:increase5m > 0)\n        >\n          0.1344\n    and\n      sum_over_time(cluster_model_name:vllm_request_success:increase5m[1h:1m]) / 5 >= 50\n  )\nor\n  (\n            sum_over_time(cluster_model_name:vllm_slo_ttft_bad:increase5m[6h])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_ttft_all:increase5m[6h]) > 0)\n        >\n          0.035\n      and\n            sum_over_time(cluster_model_name:vllm_slo_ttft_bad:increase5m[30m])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_ttft_all:increase5m[30m]) > 0)\n        >\n          0.035\n    and\n      sum_over_time(cluster_model_name:vllm_request_success:increase5m[6h:5m]) >= 50\n  )",
     "for": "2m",
     "labels": {
      "severity": "critical",
      "owner": "serving"
     },
     "annotations": {
      "summary": "TTFT SLO burning fast: {{ $labels.model_name }}",
      "description": "{{ $value | humanizePercentage }} of the first tokens of {{ $labels.model_name }} took longer than 2.5 s (allowed: 1 %) over 1h or 6h: at this rate the error budget of 7d is used up within 2 days or less. Compare its engines, and queue time with prefill time: one slow engine is the cause itself, all of them mean load.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMTTFTBudgetBurn?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=993946"
     }
    },
    {
     "alert": "VLLMInterTokenBudgetBurn",
     "expr": "  (\n            sum_over_time(cluster_model_name:vllm_slo_inter_token_bad:increase5m[1h])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_inter_token_all:increase5m[1h]) > 0)\n        >\n          0.1344\n      and\n            cluster_model_name:vllm_slo_inter_token_bad:increase5m\n          /\n            (cluster_model_name:vllm_slo_inter_token_all:increase5m > 0)\n        >\n          0.1344\n    and\n      sum_over_time(cluster_model_name:vllm_request_success:increase5m[1h:1m]) / 5 >= 50\n  )\nor\n  (\n            sum_over_time(cluster_model_name:vllm_slo_inter_token_bad:increase5m[6h])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_inter_token_all:increase5m[6h]) > 0)\n        >\n          0.035\n      and\n            sum_over_time(cluster_model_name:vllm_slo_inter_token_bad:increase5m[30m])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_inter_token_all:increase5m[30m]) > 0)\n        >\n          0.035\n    and\n      sum_over_time(cluster_model_name:vllm_request_success:increase5m[6h:5m]) >= 50\n  )",
     "for": "2m",
     "labels": {
      "severity": "critical",
      "owner": "serving"
     },
     "annotations": {
      "summary": "InterToken SLO burning fast: {{ $labels.model_name }}",
      "description": "{{ $value | humanizePercentage }} of the gaps between tokens of {{ $labels.model_name }} took longer than 0.1 s (allowed: 1 %) over 1h or 6h: at this rate the error budget of 7d is used up within 2 days or less. Compare its engines, and how many requests share a step: one slow engine is the cause itself, all of them mean load.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMInterTokenBudgetBurn?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=95121"
     }
    },
    {
     "alert": "VLLMSuccessBudgetBurn",
     "expr": "  (\n            sum_over_time(cluster_model_name:vllm_slo_success_bad:increase5m[1h])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_success_all:increase5m[1h]) > 0)\n        >\n          0.0672\n      and\n            cluster_model_name:vllm_slo_success_bad:increase5m\n          /\n            (cluster_model_name:vllm_slo_success_all:increase5m > 0)\n        >\n          0.0672\n    and\n      sum_over_time(cluster_model_name:vllm_slo_success_all:increase5m[1h:1m]) / 5 >= 50\n  )\nor\n  (\n            sum_over_time(cluster_model_name:vllm_slo_success_bad:increase5m[6h])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_success_all:increase5m[6h]) > 0)\n        >\n          0.0175\n      and\n            sum_over_time(cluster_model_name:vllm_slo_success_bad:increase5m[30m])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_success_all:increase5m[30m]) > 0)\n        >\n          0.0175\n    and\n      sum_over_time(cluster_model_name:vllm_slo_success_all:increase5m[6h:5m]) >= 50\n  )",
     "for": "2m",
     "labels": {
      "severity": "critical",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Success SLO burning fast: {{ $labels.model_name }}",
      "description": "{{ $value | humanizePercentage }} of the requests of {{ $labels.model_name }} failed or timed out (allowed: 0.5 %) over 1h or 6h: at this rate the error budget of 7d is used up within 2 days or less. Check the failure reason in the request log, then whether every engine answers. For a model without a request log: share of HTTP 5xx, which is coarse (failed streams have status 200).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMSuccessBudgetBurn?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=407342"
     }
    }
   ]
  },
  {
   "name": "vllm-critical-transfers",
   "rules": [
    {
     "alert": "VLLMKVTransferStuck",
     "expr": "    sum by (cluster, namespace, job, instance, model_name, pod) (\n      min_over_time(vllm:num_requests_kv_fetch_by_stage{stage=\"in_progress\"}[2m])\n    )\n  >\n    0\nunless on (cluster, namespace, job, instance, model_name, pod)\n    sum by (cluster, namespace, job, instance, model_name, pod) (\n      increase(vllm:prompt_tokens_by_source_total{source=\"external_kv_transfer\"}[2m])\n    )\n  >\n    0",
     "for": "0s",
     "labels": {
      "severity": "critical",
      "owner": "serving"
     },
     "annotations": {
      "summary": "KV transfer stuck: {{ $labels.model_name }} on {{ $labels.instance }} receives no KV cache",
      "description": "{{ $value | humanize }} or more requests for {{ $labels.model_name }} on {{ $labels.instance }} have waited for their KV cache for 2 min and none has arrived. Their clients wait, while this engine serves others. Find the prefill engine that makes no progress (First five minutes, step 2): it holds the blocks and is the likely cause. Do not restart this engine first.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMKVTransferStuck?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-prefill-decode?viewPanel=5453"
     }
    }
   ]
  },
  {
   "name": "vllm-critical-watchers",
   "rules": [
    {
     "alert": "VLLMGatewayDown",
     "expr": "  group by (cluster, namespace, job) (up{job=~\"gateway\"})\nunless\n  group by (cluster, namespace, job) (up{job=~\"gateway\"} == 1)",
     "for": "1m",
     "labels": {
      "severity": "critical",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Gateway down: no gateway of job {{ $labels.job }} answers",
      "description": "No gateway of job {{ $labels.job }} has answered Prometheus for 1 min: its clients are not served, even if the engines are healthy. Check whether requests still pass (First five minutes, step 1): if they do, only its metrics port cannot be reached.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGatewayDown?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=573577"
     }
    },
    {
     "alert": "VLLMGatewayGone",
     "expr": "  last_over_time(cluster_namespace_job:up:group{job=~\"gateway\"}[1d])\nunless\n  group by (cluster, namespace, job) (up{job=~\"gateway\"})",
     "for": "3m",
     "labels": {
      "severity": "critical",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Gateway targets lost: service discovery finds no gateway of job {{ $labels.job }}",
      "description": "Job {{ $labels.job }} had a gateway within the last day; service discovery has found none for 3 min: its pod may be evicted or pending, and no other alert about it can fire. Check whether it still answers clients. If it was removed on purpose, silence this alert: it ends after a day.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGatewayGone?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=573577"
     }
    }
   ]
  },
  {
   "name": "vllm-warning-engine",
   "rules": [
    {
     "alert": "VLLMEngineUnreachable",
     "expr": "    up{job=~\"vllm.*\"} == 0\n  and\n    (max_over_time(up{job=~\"vllm.*\"}[1h]) == 1 or last_over_time(up{job=~\"vllm.*\"}[1h] offset 10m))\nunless on (cluster, instance)\n  (\n      label_replace(\n          max by (cluster, address) (vllm_watch_gateway_engine_state{state=\"scaling\"})\n        or\n          max by (cluster, address) (vllm_watch_engine_state{state=\"scaling\"}),\n        \"instance\",\n        \"$1\",\n        \"address\",\n        \"(.+)\"\n      )\n    ==\n      1\n  )",
     "for": "2m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "vLLM unreachable: {{ $labels.instance }} of job {{ $labels.job }} does not answer its scrape",
      "description": "{{ $labels.instance }} of job {{ $labels.job }} has not answered Prometheus for 2 min, although it did within the last hour or has had more time than a start takes. Its requests are lost, and the other engines of the job carry its load. Check whether the process runs, and read the end of its log.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMEngineUnreachable?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=949305"
     }
    },
    {
     "alert": "VLLMEngineGone",
     "expr": "  last_over_time(cluster_namespace_job:up:group{job=~\"vllm.*\"}[1d])\nunless\n  group by (cluster, namespace, job) (up{job=~\"vllm.*\"})",
     "for": "15m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "vLLM targets lost: service discovery finds no engine of job {{ $labels.job }}",
      "description": "Job {{ $labels.job }} had engines within the last day; service discovery has found none for 15 min, so no other alert about them can fire. Check whether the engines still serve. If they were removed on purpose, silence this alert: it ends after a day.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMEngineGone?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=573577"
     }
    },
    {
     "alert": "VLLMMetricsAbsent",
     "expr": "  up{job=~\"vllm.*\"} == 1\nunless on (cluster, namespace, job, instance, pod)\n  vllm:num_requests_running{job=~\"vllm.*\"}",
     "for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "vLLM metrics missing: {{ $labels.instance }} of job {{ $labels.job }} exposes no vllm: series",
      "description": "{{ $labels.instance }} of job {{ $labels.job }} has answered its scrape for 5 min without any vllm: series: its panels are empty, and no other alert about it can fire. Check that the scrape address is the engine's own port and that vLLM runs without --disable-log-stats.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMMetricsAbsent?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=894278"
     }
    },
    {
     "alert": "VLLMSlowStart",
     "expr": "    min_over_time(cluster_namespace_job_instance_pod:process_age_seconds:min[1h]) > 600\n  and\n      max by (cluster, namespace, job, instance, pod) (time() - process_start_time_seconds{job=~\"vllm.*\"})\n    <\n      3600\nand\n  min by (cluster, namespace, job, instance, pod) (min_over_time(up{job=~\"vllm.*\"}[1h])) == 0",
     "for": "0s",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "vLLM slow start: {{ $labels.instance }} of job {{ $labels.job }}",
      "description": "{{ $labels.instance }} of job {{ $labels.job }} first answered {{ $value | humanizeDuration }} after its process started, within the last hour: too late to replace a failed engine. Compare the load, compile and graph-capture times in its log with those of an earlier start.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMSlowStart?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-fleet?viewPanel=123208"
     }
    },
    {
     "alert": "VLLMQueueGrowing",
     "expr": "    sum by (cluster, namespace, job, instance, model_name, pod) (\n      min_over_time(vllm:num_requests_waiting[10m])\n    )\n  >\n    10\nand\n    sum by (cluster, namespace, job, instance, model_name, pod) (delta(vllm:num_requests_waiting[10m]))\n  >=\n    10",
     "for": "5m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Queue growing: {{ $labels.model_name }} on {{ $labels.instance }}",
      "description": "At least {{ $value | humanize }} requests have waited for {{ $labels.model_name }} on {{ $labels.instance }} for 10 min, and the queue grows: more arrive than it finishes. Check whether other engines of the model have room, and send new requests there; if none has, pause batch work.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMQueueGrowing?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-fleet?viewPanel=183486"
     }
    },
    {
     "alert": "VLLMRequestsDeferred",
     "expr": "  sum by (cluster, namespace, job, instance, model_name, pod) (\n    min_over_time(vllm:num_requests_waiting_by_reason{reason=\"deferred\"}[10m])\n  )\n>\n  0",
     "for": "10m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Requests deferred: {{ $labels.model_name }} on {{ $labels.instance }}",
      "description": "At least {{ $value | humanize }} requests for {{ $labels.model_name }} on {{ $labels.instance }} have waited for 10 min for an adapter slot, a grammar or a KV-cache transfer, not for free blocks. Check whether more LoRA adapters are in use than --max-loras admits at once (First five minutes, step 3).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMRequestsDeferred?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=495560"
     }
    },
    {
     "alert": "VLLMGoldenDiffers",
     "expr": "  max by (cluster, namespace, job, instance, pod, address, model_name, verdict, cause) (\n    vllm_watch_golden_verdict{verdict!=\"same\"}\n  )\n==\n  1",
     "for": "1m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Golden prompts {{ $labels.verdict }}: {{ $labels.model_name }} on {{ $labels.address }}",
      "description": "{{ $labels.model_name }} on {{ $labels.address }} has been {{ $labels.verdict }} (cause: {{ $labels.cause }}) for 1 min by its last golden check: it does not compute what was recorded, and answers may be wrong. Take the engine out of the load balancer unless it was changed on purpose, then run vllm-watch golden check again (First five minutes, step 2).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGoldenDiffers?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=297982"
     }
    },
    {
     "alert": "VLLMGoldenStale",
     "expr": "  max by (cluster, namespace, job, instance, pod, address, model_name) (\n    time() - vllm_watch_golden_check_timestamp_seconds\n  )\n>\n    3\n  *\n    (\n        max by (cluster, namespace, job, instance, pod, address, model_name) (\n          vllm_watch_golden_check_interval_seconds\n        )\n      >\n        0\n    )",
     "for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "platform"
     },
     "annotations": {
      "summary": "Golden checks missing: {{ $labels.model_name }} on {{ $labels.address }}",
      "description": "For 5 min more than 3 intervals have passed since the last complete golden check of {{ $labels.model_name }} on {{ $labels.address }}, {{ $value | humanizeDuration }}: damage would not be noticed. Check that vllm-watch golden check runs and reaches the engine, and read the error that it prints (First five minutes, step 2).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGoldenStale?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=566500"
     }
    }
   ]
  },
  {
   "name": "vllm-warning-slo",
   "rules": [
    {
     "alert": "VLLMTTFTBudgetSlowBurn",
     "expr": "  (\n            sum_over_time(cluster_model_name:vllm_slo_ttft_bad:increase1h[1d])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_ttft_all:increase1h[1d]) > 0)\n        >\n          0.014\n      and\n            sum_over_time(cluster_model_name:vllm_slo_ttft_bad:increase5m[2h])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_ttft_all:increase5m[2h]) > 0)\n        >\n          0.014\n    and\n      sum_over_time(cluster_model_name:vllm_request_success:increase1h[1d]) / 12 >= 50\n  )\nor\n  (\n            sum_over_time(cluster_model_name:vllm_slo_ttft_bad:increase1h[3d])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_ttft_all:increase1h[3d]) > 0)\n        >\n          0.0098\n      and\n            sum_over_time(cluster_model_name:vllm_slo_ttft_bad:increase5m[6h])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_ttft_all:increase5m[6h]) > 0)\n        >\n          0.0098\n    and\n      sum_over_time(cluster_model_name:vllm_request_success:increase1h[3d]) / 12 >= 50\n  )",
     "for": "15m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "TTFT SLO burning slowly: {{ $labels.model_name }}",
      "description": "{{ $value | humanizePercentage }} of the first tokens of {{ $labels.model_name }} took longer than 2.5 s (allowed: 1 %) over 1d or 3d: this uses up about the whole error budget of 7d. Check whether it continues in the last hour and at which hours it happened, then look for a load pattern or a change.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMTTFTBudgetSlowBurn?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=993946"
     }
    },
    {
     "alert": "VLLMInterTokenBudgetSlowBurn",
     "expr": "  (\n            sum_over_time(cluster_model_name:vllm_slo_inter_token_bad:increase1h[1d])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_inter_token_all:increase1h[1d]) > 0)\n        >\n          0.014\n      and\n            sum_over_time(cluster_model_name:vllm_slo_inter_token_bad:increase5m[2h])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_inter_token_all:increase5m[2h]) > 0)\n        >\n          0.014\n    and\n      sum_over_time(cluster_model_name:vllm_request_success:increase1h[1d]) / 12 >= 50\n  )\nor\n  (\n            sum_over_time(cluster_model_name:vllm_slo_inter_token_bad:increase1h[3d])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_inter_token_all:increase1h[3d]) > 0)\n        >\n          0.0098\n      and\n            sum_over_time(cluster_model_name:vllm_slo_inter_token_bad:increase5m[6h])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_inter_token_all:increase5m[6h]) > 0)\n        >\n          0.0098\n    and\n      sum_over_time(cluster_model_name:vllm_request_success:increase1h[3d]) / 12 >= 50\n  )",
     "for": "15m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "InterToken SLO burning slowly: {{ $labels.model_name }}",
      "description": "{{ $value | humanizePercentage }} of the gaps between tokens of {{ $labels.model_name }} took longer than 0.1 s (allowed: 1 %) over 1d or 3d: this uses up about the whole error budget of 7d. Check whether it continues in the last hour and at which hours it happened, then look for a load pattern or a change.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMInterTokenBudgetSlowBurn?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=95121"
     }
    },
    {
     "alert": "VLLMSuccessBudgetSlowBurn",
     "expr": "  (\n            sum_over_time(cluster_model_name:vllm_slo_success_bad:increase1h[1d])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_success_all:increase1h[1d]) > 0)\n        >\n          0.007\n      and\n            sum_over_time(cluster_model_name:vllm_slo_success_bad:increase5m[2h])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_success_all:increase5m[2h]) > 0)\n        >\n          0.007\n    and\n      sum_over_time(cluster_model_name:vllm_slo_success_all:increase1h[1d]) / 12 >= 50\n  )\nor\n  (\n            sum_over_time(cluster_model_name:vllm_slo_success_bad:increase1h[3d])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_success_all:increase1h[3d]) > 0)\n        >\n          0.0049\n      and\n            sum_over_time(cluster_model_name:vllm_slo_success_bad:increase5m[6h])\n          /\n            (sum_over_time(cluster_model_name:vllm_slo_success_all:increase5m[6h]) > 0)\n        >\n          0.0049\n    and\n      sum_over_time(cluster_model_name:vllm_slo_success_all:increase1h[3d]) / 12 >= 50\n  )",
     "for": "15m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Success SLO burning slowly: {{ $labels.model_name }}",
      "description": "{{ $value | humanizePercentage }} of the requests of {{ $labels.model_name }} failed or timed out (allowed: 0.5 %) over 1d or 3d: this uses up about the whole error budget of 7d. Check whether it continues in the last hour and at which hours it happened, then look for a load pattern or a change. For a model without a request log: share of HTTP 5xx, which is coarse (failed streams have status 200).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMSuccessBudgetSlowBurn?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=407342"
     }
    }
   ]
  },
  {
   "name": "vllm-warning-transfers",
   "rules": [
    {
     "alert": "VLLMKVTransfersFailing",
     "expr": "    (\n        sum by (cluster, namespace, job, instance, model_name, pod) (\n          increase(vllm:nixl_num_failed_transfers_total[10m])\n        )\n      >=\n        3\n    )\n  or\n    (\n        sum by (cluster, namespace, job, instance, model_name, pod) (\n          increase(vllm:mooncake_num_failed_transfers_total[10m])\n        )\n      >=\n        3\n    )\nor\n  (\n      sum by (cluster, namespace, job, instance, model_name, pod) (\n        increase(vllm:mooncake_num_failed_recvs_total[10m])\n      )\n    >=\n      3\n  )",
     "for": "0s",
     "keep_firing_for": "10m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "KV transfers failing: {{ $labels.model_name }} on {{ $labels.instance }}",
      "description": "{{ $value | humanize }} KV transfers of {{ $labels.model_name }} on {{ $labels.instance }} failed over 10 min: each costs a second prefill or the request. Read the log of this engine for the peer's address, then check whether that engine runs and is reachable.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMKVTransfersFailing?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-prefill-decode?viewPanel=535070"
     }
    },
    {
     "alert": "VLLMKVTransferSlow",
     "expr": "  (\n          histogram_quantile(\n            0.95,\n            sum by (cluster, namespace, job, instance, model_name, pod, le) (\n              rate(vllm:nixl_xfer_time_seconds_bucket[10m])\n            )\n          )\n        >=\n          0\n      >\n        1\n    and\n        sum by (cluster, namespace, job, instance, model_name, pod) (\n          increase(vllm:nixl_xfer_time_seconds_count[10m])\n        )\n      >=\n        10\n  )\nor\n  (\n          histogram_quantile(\n            0.95,\n            sum by (cluster, namespace, job, instance, model_name, pod, le) (\n              rate(vllm:mooncake_xfer_time_seconds_bucket[10m])\n            )\n          )\n        >=\n          0\n      >\n        1\n    and\n        sum by (cluster, namespace, job, instance, model_name, pod) (\n          increase(vllm:mooncake_xfer_time_seconds_count[10m])\n        )\n      >=\n        10\n  )",
     "for": "5m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "KV transfers slow: {{ $labels.model_name }} on {{ $labels.instance }}",
      "description": "The p95 time of a KV transfer of {{ $labels.model_name }} on {{ $labels.instance }} is {{ $value | humanizeDuration }} over 10 min; the client waits for it before the first token. Compare the bandwidth with what the link carries: near it the link is full, far below it look at the transport that NIXL chose.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMKVTransferSlow?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-prefill-decode?viewPanel=368949"
     }
    },
    {
     "alert": "VLLMKVBlocksExpired",
     "expr": "  (\n      sum by (cluster, namespace, job, instance, model_name, pod) (\n        increase(vllm:nixl_num_kv_expired_reqs_total[10m])\n      )\n    >=\n      3\n  )\nor\n  (\n      sum by (cluster, namespace, job, instance, model_name, pod) (\n        increase(vllm:mooncake_num_kv_expired_reqs_total[10m])\n      )\n    >=\n      3\n  )",
     "for": "0s",
     "keep_firing_for": "10m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "KV blocks expired: {{ $labels.model_name }} on {{ $labels.instance }}",
      "description": "{{ $value | humanize }} finished prefills of {{ $labels.model_name }} on {{ $labels.instance }} were never fetched over 10 min: their blocks were held until the lease ended, and the prompts are computed again. Check whether decode engines wait or are down, and whether the router drops requests between its two calls.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMKVBlocksExpired?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-prefill-decode?viewPanel=535070"
     }
    }
   ]
  },
  {
   "name": "vllm-warning-latency",
   "rules": [
    {
     "alert": "VLLMQueueTimeHigh",
     "expr": "  max by (cluster, namespace, job, instance, model_name) (\n    cluster_namespace_job_instance_model_name:vllm_queue_time_seconds:p95_5m\n  )\n>\n  5",
     "for": "5m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Queue time high: {{ $labels.model_name }} on {{ $labels.instance }}",
      "description": "The p95 queue time of {{ $labels.model_name }} on {{ $labels.instance }} is {{ $value | humanizeDuration }} over 5 min: one request in twenty waits that long or longer before it is scheduled. Check if requests wait now: if none does, the burst is over; if they do, ask the team that sends most to pause its batch work.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMQueueTimeHigh?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=807891"
     }
    }
   ]
  },
  {
   "name": "vllm-warning-cache",
   "rules": [
    {
     "alert": "VLLMKVCacheNearlyFull",
     "expr": "  max by (cluster, namespace, job, instance, model_name, pod) (\n    vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc\n  )\n>\n  0.9",
     "for": "5m",
     "keep_firing_for": "2m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "KV cache nearly full: {{ $labels.model_name }} on {{ $labels.instance }}",
      "description": "{{ $labels.model_name }} on {{ $labels.instance }} uses {{ $value | humanizePercentage }} of its KV-cache blocks, above 90 % for 5 min; when no block is free, vLLM preempts requests. Check whether requests wait or are preempted: if so, pause batch work; if not, look again in 10 min.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMKVCacheNearlyFull?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=956188"
     }
    },
    {
     "alert": "VLLMPreemptionsSustained",
     "expr": "  sum by (cluster, namespace, job, instance, model_name, pod) (rate(vllm:num_preemptions_total[5m]))\n>\n  0.1",
     "for": "10m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Preemptions sustained: {{ $labels.model_name }} on {{ $labels.instance }}",
      "description": "{{ $value | printf \"%.3g\" }} requests per second for {{ $labels.model_name }} on {{ $labels.instance }} have lost their KV-cache blocks for 10 min and are computed again. Check the preemptions per finished request (First five minutes, step 1): above 0.5 pause batch work, or move load to another engine.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMPreemptionsSustained?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-kv-cache?viewPanel=809224"
     }
    },
    {
     "alert": "VLLMKVCacheThrashing",
     "expr": "    max by (cluster, namespace, job, instance, model_name, pod) (\n      vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc\n    )\n  >\n    0.95\nand\n    sum by (cluster, namespace, job, instance, model_name, pod) (rate(vllm:num_preemptions_total[5m]))\n  >\n    0",
     "for": "5m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "KV cache thrashing: {{ $labels.model_name }} on {{ $labels.instance }}",
      "description": "{{ $labels.model_name }} on {{ $labels.instance }} uses {{ $value | humanizePercentage }} of its KV-cache blocks and has preempted running requests for 5 min: work is computed twice. Take load off this engine: ask the team that sends most to pause, batch work first.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMKVCacheThrashing?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-kv-cache?viewPanel=750156"
     }
    },
    {
     "alert": "VLLMCacheHitsCollapsed",
     "expr": "      sum_over_time(cluster_model_name:vllm_prefix_cache_hits:increase5m[30m])\n    /\n      (sum_over_time(cluster_model_name:vllm_prefix_cache_queries:increase5m[30m]) > 0)\n  <\n      0.5\n    *\n      (\n            sum_over_time(cluster_model_name:vllm_prefix_cache_hits:increase1h[1d])\n          /\n            (sum_over_time(cluster_model_name:vllm_prefix_cache_queries:increase1h[1d]) > 0)\n        >\n          0.2\n      )\nand\n  sum_over_time(cluster_model_name:vllm_request_success:increase5m[30m:1m]) / 5 >= 100",
     "for": "10m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Prefix cache hits collapsed: {{ $labels.model_name }}",
      "description": "{{ $value | humanizePercentage }} of the prompt tokens of {{ $labels.model_name }} came from the prefix cache over 30 min, less than 50 % of the ratio over the last day; the rest is computed again. Check whether an engine restarted or joined (First five minutes, step 2), then whether a prompt template or the routing changed.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMCacheHitsCollapsed?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-kv-cache?viewPanel=911000"
     }
    }
   ]
  },
  {
   "name": "vllm-warning-traffic",
   "rules": [
    {
     "alert": "VLLMErrorRatioHigh",
     "expr": "      sum by (cluster, model_name) (\n        cluster_model_name_outcome:vllm_watch_requests:increase5m{outcome=~\"upstream_error|timeout\"}\n      )\n    /\n      (sum by (cluster, model_name) (cluster_model_name_outcome:vllm_watch_requests:increase5m) > 0)\n  >\n    0.005\nand\n    sum by (cluster, model_name) (\n      cluster_model_name_outcome:vllm_watch_requests:increase5m{outcome=~\"upstream_error|timeout\"}\n    )\n  >=\n    5",
     "for": "5m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Error ratio high: {{ $labels.model_name }}",
      "description": "{{ $value | humanizePercentage }} of the requests for {{ $labels.model_name }} ended in an error or a timeout over 5 min. Check the failure reason and the team in the request log (First five minutes, step 1), then whether every engine answers.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMErrorRatioHigh?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=407342"
     }
    },
    {
     "alert": "VLLMHTTPErrorRatioHigh",
     "expr": "      cluster_namespace_job_instance_pod_model_name:vllm_http_failed:increase5m\n    /\n      (cluster_namespace_job_instance_pod_model_name:vllm_http_ended:increase5m > 0)\n  >\n    0.005\nand\n  cluster_namespace_job_instance_pod_model_name:vllm_http_failed:increase5m >= 5",
     "for": "5m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "HTTP error ratio high: {{ $labels.model_name }} on {{ $labels.instance }}",
      "description": "{{ $labels.instance }} answered {{ $value | humanizePercentage }} of the requests for {{ $labels.model_name }} with HTTP 5xx over 5 min. Coarse, as the model has no request log: rejected and failed streams have status 200. Read the newest errors in the engine's log (First five minutes, step 1); if only this engine fails, take it out of the load balancer.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMHTTPErrorRatioHigh?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=407342"
     }
    },
    {
     "alert": "VLLMEngineRejecting",
     "expr": "  sum by (cluster, namespace, job, instance, model_name, pod) (\n    increase(vllm:admission_rejections_total[5m])\n  )\n>=\n  10",
     "for": "2m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Engine rejects requests: {{ $labels.model_name }} on {{ $labels.instance }}",
      "description": "{{ $labels.instance }} has rejected {{ $value | humanize }} requests for {{ $labels.model_name }} within 5 min by its own queue limit; a rejected stream still has HTTP status 200. Check whether other engines of the model have room, and ask the largest sender to pause batch work.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMEngineRejecting?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-tuning-options?viewPanel=477381"
     }
    },
    {
     "alert": "VLLMGatewayRejecting",
     "expr": "      (\n          sum by (cluster, team) (\n            rate(vllm_watch_request_reasons_total{outcome=\"rejected\",reason!~\"engine_busy|bad_request\"}[5m])\n          )\n        or\n          sum by (cluster, team) (rate(vllm_watch_requests_total[5m])) * 0\n      )\n    /\n      (sum by (cluster, team) (rate(vllm_watch_requests_total[5m])) > 0)\n  >\n    0.1\nand\n    sum by (cluster, team) (\n      increase(vllm_watch_request_reasons_total{outcome=\"rejected\",reason!~\"engine_busy|bad_request\"}[5m])\n    )\n  >=\n    5",
     "for": "5m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Gateway rejects requests: team {{ $labels.team }}",
      "description": "The gateway rejected {{ $value | humanizePercentage }} of the requests of team {{ $labels.team }} over 5 min. Check the reason (First five minutes, step 1): it distinguishes a limit that is too low from a client that does not back off or sends a wrong key.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGatewayRejecting?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-teams?viewPanel=477381"
     }
    },
    {
     "alert": "VLLMClientHangupsRising",
     "expr": "  (\n        (\n              sum by (cluster, model_name) (\n                cluster_model_name_outcome:vllm_watch_requests:increase5m{outcome=\"client_abort\"}\n              )\n            /\n              (sum by (cluster, model_name) (cluster_model_name_outcome:vllm_watch_requests:increase5m) > 0)\n          >\n            0.1\n        )\n      >\n          2\n        *\n          (\n              sum by (cluster, model_name) (\n                sum_over_time(cluster_model_name_outcome:vllm_watch_requests:increase1h{outcome=\"client_abort\"}[1d])\n              )\n            /\n              (\n                  sum by (cluster, model_name) (\n                    sum_over_time(cluster_model_name_outcome:vllm_watch_requests:increase1h[1d])\n                  )\n                >\n                  0\n              )\n          )\n    and\n        sum by (cluster, model_name) (\n          cluster_model_name_outcome:vllm_watch_requests:increase5m{outcome=\"client_abort\"}\n        )\n      >=\n        5\n  )\nor\n    (\n            (\n                  sum by (cluster, model_name) (cluster_model_name_le:vllm_ttft_seconds_bucket:increase5m{le=\"+Inf\"})\n                -\n                  sum by (cluster, model_name) (increase(vllm:e2e_request_latency_seconds_count{role!=\"prefill\"}[5m]))\n              -\n                sum by (cluster, model_name) (vllm:num_requests_running)\n            )\n          /\n            (\n                sum by (cluster, model_name) (cluster_model_name_le:vllm_ttft_seconds_bucket:increase5m{le=\"+Inf\"})\n              >\n                0\n            )\n        >\n          0.1\n      and\n          (\n                sum by (cluster, model_name) (cluster_model_name_le:vllm_ttft_seconds_bucket:increase5m{le=\"+Inf\"})\n              -\n                sum by (cluster, model_name) (increase(vllm:e2e_request_latency_seconds_count{role!=\"prefill\"}[5m]))\n            -\n              sum by (cluster, model_name) (vllm:num_requests_running)\n          )\n        >=\n          5\n    )\n  unless on (cluster, model_name)\n    sum by (cluster, model_name) (cluster_model_name_outcome:vllm_watch_requests:increase5m)",
     "for": "5m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Client disconnects rising: {{ $labels.model_name }}",
      "description": "{{ $value | humanizePercentage }} of the clients of {{ $labels.model_name }} closed the connection over 5 min before their response was complete. Check after how many seconds they left (First five minutes, step 1): one age for all is a client timeout, many ages are people who stopped waiting.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMClientHangupsRising?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-teams?viewPanel=83750"
     }
    },
    {
     "alert": "VLLMEngineExceedsLog",
     "expr": "  (\n      sum by (cluster, model_name) (increase(vllm_watch_missing_in_log_total{kind=\"requests\"}[30m])) >= 3\n    and\n        sum by (cluster, model_name) (increase(vllm_watch_missing_in_log_total{kind=\"requests\"}[30m]))\n      >\n          0.01\n        *\n          (sum by (cluster, model_name) (increase(vllm_watch_reconcile_engine_total{kind=\"requests\"}[30m])))\n  )\nor\n    (\n          (\n              cluster:vllm_request_success:increase30m\n            -\n              sum by (cluster) (cluster_outcome:vllm_watch_requests:increase30m{outcome!=\"rejected\"})\n          )\n        >=\n          10\n      and\n          (\n              cluster:vllm_request_success:increase30m\n            -\n              sum by (cluster) (cluster_outcome:vllm_watch_requests:increase30m{outcome!=\"rejected\"})\n          )\n        >\n          0.05 * (cluster:vllm_request_success:increase30m)\n    )\n  unless on (cluster)\n    vllm_watch_reconcile_settled_timestamp_seconds",
     "for": "15m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Request log incomplete{{ with $labels.model_name }}: {{ . }}{{ end }}{{ with $labels.cluster }} in {{ . }}{{ end }}",
      "description": "The engines{{ with $labels.cluster }} of {{ . }}{{ end }} finished {{ $value | humanize }} more requests{{ with $labels.model_name }} for {{ . }}{{ end }} within 30 min than the request log contains: clients bypass the gateway, or records are lost. Check which model and cause the sidecar reports (First five minutes, step 1).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMEngineExceedsLog?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=166506"
     }
    },
    {
     "alert": "VLLMLogExceedsEngine",
     "expr": "  (\n        sum by (cluster, model_name) (\n          increase(vllm_watch_extra_in_log_total{cause!~\"restart|start\",kind=\"requests\"}[30m])\n        )\n      >=\n        3\n    and\n        sum by (cluster, model_name) (\n          increase(vllm_watch_extra_in_log_total{cause!~\"restart|start\",kind=\"requests\"}[30m])\n        )\n      >\n          0.01\n        *\n          (sum by (cluster, model_name) (increase(vllm_watch_reconcile_logged_total{kind=\"requests\"}[30m])))\n  )\nor\n    (\n          (\n              sum by (cluster) (cluster_outcome:vllm_watch_requests:increase30m{outcome=\"ok\"})\n            -\n              cluster:vllm_request_success:increase30m\n          )\n        >=\n          10\n      and\n          (\n              sum by (cluster) (cluster_outcome:vllm_watch_requests:increase30m{outcome=\"ok\"})\n            -\n              cluster:vllm_request_success:increase30m\n          )\n        >\n          0.05 * (sum by (cluster) (cluster_outcome:vllm_watch_requests:increase30m{outcome=\"ok\"}))\n    )\n  unless on (cluster)\n    vllm_watch_reconcile_settled_timestamp_seconds",
     "for": "15m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Request log exceeds engines{{ with $labels.model_name }}: {{ . }}{{ end }}{{ with $labels.cluster }} in {{ . }}{{ end }}",
      "description": "The request log{{ with $labels.cluster }} of {{ . }}{{ end }} contains {{ $value | humanize }} more successful requests{{ with $labels.model_name }} for {{ . }}{{ end }} within 30 min than the engines finished: an engine is not scraped, or records were written twice. Compare the engines that the gateway uses with those that Prometheus scrapes.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMLogExceedsEngine?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=741339"
     }
    },
    {
     "alert": "VLLMRequestLogLagging",
     "expr": "    max by (cluster, namespace, job, instance, pod, path) (vllm_watch_log_lag_seconds) > 60\n  and on (cluster, namespace, job, instance, pod)\n    sum by (cluster, namespace, job, instance, pod) (increase(vllm_watch_log_lines_total[5m])) > 0\nor\n    sum by (cluster, namespace, job, instance, pod, path) (\n      min_over_time(vllm_watch_log_unread_bytes[5m])\n    )\n  >\n    1048576",
     "for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Request log lagging: {{ $labels.path }} on {{ $labels.instance }}",
      "description": "For 5 min, {{ $labels.instance }} has counted the records of {{ $labels.path }} more than 60 s late or left part of the file unread: metrics per team are as late. Check whether the lag still grows (First five minutes, step 1); if it shrinks, wait until the sidecar has caught up.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMRequestLogLagging?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=778499"
     }
    },
    {
     "alert": "VLLMRequestLogUnwritable",
     "expr": "      sum by (cluster, namespace, job, instance, pod) (increase(vllm_watch_gateway_log_errors_total[5m]))\n    >\n      0\n  or\n      sum by (cluster, namespace, job, instance, pod) (increase(vllm_watch_gateway_log_lost_total[5m]))\n    >\n      0\nor\n  sum by (cluster, namespace, job, instance, pod) (vllm_watch_gateway_log_lost_before_requests) > 0",
     "for": "1m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Request log not writable: gateway {{ $labels.instance }}",
      "description": "The gateway {{ $labels.instance }} failed to write request records within 5 min: they wait in memory, and are lost when there are too many. Or it ended within the last hour without writing the records of accepted requests. Check free space, inodes and permissions on the disk of the request log.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMRequestLogUnwritable?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=817749"
     }
    },
    {
     "alert": "VLLMResponsesUnreadable",
     "expr": "  sum by (cluster, namespace, job, instance, pod, route, reason) (\n    increase(vllm_watch_gateway_unreadable_total{reason!=\"size\"}[5m])\n  )\n>\n  0",
     "for": "5m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Responses unreadable ({{ $labels.reason }}): {{ $labels.route }} on {{ $labels.instance }}",
      "description": "The gateway {{ $labels.instance }} could not read {{ $value | humanize }} responses of engines to {{ $labels.route }} within 5 min (reason: {{ $labels.reason }}), and it has gone on for 5 min. Their requests failed, or their token counts are unknown. Find the engine in the request log (Do this first, step 2), then ask it directly (step 3).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMResponsesUnreadable?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-gateway?viewPanel=585885"
     }
    },
    {
     "alert": "VLLMGatewayNotSharing",
     "expr": "  sum by (cluster, namespace, job, instance, pod) (vllm_watch_gateway_lease_lost) > 0\nor\n  max by (cluster, namespace, job, instance, pod) (vllm_watch_gateway_lease_policies) > 1",
     "for": "1m",
     "labels": {
      "severity": "warning",
      "owner": "platform"
     },
     "annotations": {
      "summary": "Gateway not sharing limits: {{ $labels.instance }}",
      "description": "The gateway {{ $labels.instance }} has had no lease from its Valkey or Redis for 1 min and admits within a fixed share of every limit, so slots may stay unused. Or gateways have different policies. Read the line `no lease from` or `policies differ` in its log.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGatewayNotSharing?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-gateway?viewPanel=782006"
     }
    },
    {
     "alert": "VLLMCostOverBudget",
     "expr": "      (\n          sum by (cluster, currency) (rate(vllm_watch_cost_total{basis=\"allocation\"}[1h]))\n        or\n            sum by (cluster, currency) (vllm_watch_gpu_cost_per_hour) / 3600\n          unless on (cluster)\n            sum by (cluster, currency) (rate(vllm_watch_cost_total{basis=\"allocation\"}[1h]))\n      )\n    / on (cluster) group_left ()\n      (\n          (\n              sum by (cluster) (rate(vllm:prompt_tokens_total{role!=\"prefill\"}[1h]))\n            +\n              sum by (cluster) (rate(vllm:generation_tokens_total{role!=\"prefill\"}[1h]))\n          )\n        >\n          0\n      )\n  *\n    1000\n> on (cluster, currency)\n  min by (cluster, currency) (vllm_watch_cost_budget_per_1k_tokens)",
     "for": "1h",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Cost over budget: {{ $labels.currency }} per 1,000 tokens{{ with $labels.cluster }} in cluster {{ . }}{{ end }}",
      "description": "1,000 tokens have cost {{ $value | printf \"%.3g\" }} {{ $labels.currency }} over the last hour, idle GPUs included, which is more than the configured budget. Check how much of the cost is idle time (team __idle__; First five minutes, step 1) before changing anything: it falls with more load or fewer GPUs.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMCostOverBudget?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-cost?viewPanel=52251"
     }
    },
    {
     "alert": "VLLMCanaryRolledBack",
     "expr": "    time()\n  -\n    (max by (cluster, variant) (vllm_watch_canary_step_timestamp_seconds{step=~\"roll_back\"}) > 0)\n<\n  86400",
     "for": "1m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Canary rolled back: variant {{ $labels.variant }}",
      "description": "vllm-watch canary stopped variant {{ $labels.variant }} within the last day ({{ $value | humanizeDuration }} ago), or advises to: it was worse than the other engines, failed, or hung. Read the reason in its newest event (First five minutes, step 1), and check that its share is 0.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMCanaryRolledBack?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-gateway?viewPanel=567920"
     }
    },
    {
     "alert": "VLLMCanaryUndecided",
     "expr": "      time()\n    -\n      (\n          max by (cluster, variant) (vllm_watch_canary_step_timestamp_seconds{step=~\"undecided|interrupted\"})\n        >\n          0\n      )\n  <\n    86400\nor\n      time()\n    -\n      (max by (cluster, variant) (vllm_watch_canary_step_timestamp_seconds{step=~\"start|raise\"}) > 0)\n  >\n    691200",
     "for": "1m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Canary without a verdict: variant {{ $labels.variant }}",
      "description": "vllm-watch canary ended without a verdict on variant {{ $labels.variant }} within the last day, or has not acted within the last week (last act: {{ $value | humanizeDuration }} ago): too little traffic, teams.yaml changed meanwhile, or the command no longer runs. Read the newest event (First five minutes, step 1), and decide on the share by hand.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMCanaryUndecided?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-gateway?viewPanel=567920"
     }
    }
   ]
  },
  {
   "name": "vllm-warning-gpu",
   "rules": [
    {
     "alert": "VLLMGPUMissing",
     "expr": "        group by (cluster, namespace, job, instance, uuid) (last_over_time(vllm_watch_gpu_info[1h]))\n      unless\n        group by (cluster, namespace, job, instance, uuid) (vllm_watch_gpu_info)\n    and on (cluster, namespace, job, instance)\n      (up{job=~\"sidecar\"} == 1)\n  or\n      min by (cluster, namespace, job, instance, source) (vllm_watch_source_up{kind=\"gpu\"}) == 0\n    and\n      min by (cluster, namespace, job, instance, source) (\n        vllm_watch_source_last_success_timestamp_seconds{kind=\"gpu\"}\n      )\nor\n  max by (cluster, namespace, job, instance, uuid) (vllm_watch_gpu_absent_values{reason=\"lost\"}) > 0",
     "for": "2m",
     "labels": {
      "severity": "warning",
      "owner": "hardware"
     },
     "annotations": {
      "summary": "GPU missing:{{ with $labels.uuid }} {{ . }}{{ end }} on {{ $labels.instance }}",
      "description": "The sidecar {{ $labels.instance }} has had no readings of a GPU{{ with $labels.uuid }} ({{ . }}){{ end }} for 2 min, although it had before: the GPU fell off the bus, or the driver does not answer. Run nvidia-smi -L on the host, and check whether the engine on it still answers.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGPUMissing?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-gpu?viewPanel=34812"
     }
    },
    {
     "alert": "VLLMGPUHot",
     "expr": "  (\n      max by (cluster, namespace, job, instance, uuid) (vllm_watch_gpu_temperature_celsius{sensor=\"gpu\"})\n    or\n      (\n          label_replace(\n            max by (cluster, namespace, job, instance, UUID) (DCGM_FI_DEV_GPU_TEMP),\n            \"uuid\",\n            \"$1\",\n            \"UUID\",\n            \"(.+)\"\n          )\n        unless on (uuid)\n          vllm_watch_gpu_info\n      )\n  )\n>\n  85",
     "for": "5m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "hardware"
     },
     "annotations": {
      "summary": "GPU hot: {{ $labels.uuid }} on {{ $labels.instance }}",
      "description": "{{ $labels.uuid }} on {{ $labels.instance }} is at {{ $value | humanize }} °C, above 85 °C for 5 min; a few degrees more and it throttles. Compare it with the other GPUs of the host: if all are hot it is the cooling, if one is hot it is this GPU.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGPUHot?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-gpu?viewPanel=847973"
     }
    },
    {
     "alert": "VLLMGPUThrottled",
     "expr": "  (\n      sum by (cluster, namespace, job, instance, uuid) (\n        rate(vllm_watch_gpu_throttle_seconds_total{reason!~\"sw_power_cap|sync_boost\"}[10m])\n      )\n    or\n      (\n          label_replace(\n              max by (cluster, namespace, job, instance, UUID) (rate(DCGM_FI_DEV_THERMAL_VIOLATION[10m]))\n            *\n              0.000000001,\n            \"uuid\",\n            \"$1\",\n            \"UUID\",\n            \"(.+)\"\n          )\n        unless on (uuid)\n          vllm_watch_gpu_info\n      )\n  )\n>\n  0.1",
     "for": "5m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "hardware"
     },
     "annotations": {
      "summary": "GPU throttled: {{ $labels.uuid }} on {{ $labels.instance }}",
      "description": "{{ $labels.uuid }} on {{ $labels.instance }} ran at reduced clocks for {{ $value | humanizePercentage }} of the last 10 min because of heat or a power brake. Check the reason (First five minutes, step 1): thermal is the cooling, hw_power_brake is the power supply or the rack.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGPUThrottled?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-gpu?viewPanel=434408"
     }
    },
    {
     "alert": "VLLMGPUXid",
     "expr": "label_replace(\n      sum by (cluster, namespace, job, instance, uuid, xid) (\n        increase(vllm_watch_gpu_xid_errors_total[1h])\n      )\n    >\n      0\n  or\n      max by (cluster, namespace, job, instance, UUID) (DCGM_FI_DEV_XID_ERRORS) > 0\n    unless\n        max by (cluster, namespace, job, instance, UUID) (DCGM_FI_DEV_XID_ERRORS)\n      ==\n        max by (cluster, namespace, job, instance, UUID) (\n          last_over_time(DCGM_FI_DEV_XID_ERRORS[1h] offset 1h)\n        ),\n  \"uuid\",\n  \"$1\",\n  \"UUID\",\n  \"(.+)\"\n)",
     "for": "0s",
     "labels": {
      "severity": "warning",
      "owner": "hardware"
     },
     "annotations": {
      "summary": "GPU error (XID): {{ $labels.uuid }} on {{ $labels.instance }}",
      "description": "The driver reported XID {{ with $labels.xid }}{{ . }}{{ else }}{{ $value | humanize }}{{ end }} for {{ $labels.uuid }} on {{ $labels.instance }} within the last hour; requests on it may be lost. Read the first XID in the kernel log (First five minutes, step 2), and check whether the engine on this GPU still makes tokens.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGPUXid?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-gpu?viewPanel=181825"
     }
    },
    {
     "alert": "VLLMGPUECCErrors",
     "expr": "label_replace(\n        max by (cluster, namespace, job, instance, uuid) (\n          increase(vllm_watch_gpu_ecc_errors_total{kind=\"uncorrected\"}[1h])\n        )\n      >\n        0\n    or\n      max by (cluster, namespace, job, instance, UUID) (increase(DCGM_FI_DEV_ECC_DBE_AGG_TOTAL[1h])) > 0\n  or\n    max by (cluster, namespace, job, instance, UUID) (DCGM_FI_DEV_ROW_REMAP_FAILURE) > 0,\n  \"uuid\",\n  \"$1\",\n  \"UUID\",\n  \"(.+)\"\n)",
     "for": "0s",
     "labels": {
      "severity": "warning",
      "owner": "hardware"
     },
     "annotations": {
      "summary": "GPU memory errors (ECC): {{ $labels.uuid }} on {{ $labels.instance }}",
      "description": "{{ $labels.uuid }} on {{ $labels.instance }} had uncorrected memory errors within the last hour, or has no spare rows left. Check whether the engine on it still answers, and how many rows were remapped (First five minutes, steps 2 and 3).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGPUECCErrors?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-gpu?viewPanel=26949"
     }
    },
    {
     "alert": "VLLMGPUNVLinkErrors",
     "expr": "label_replace(\n          sum by (cluster, namespace, job, instance, uuid) (\n            increase(vllm_watch_gpu_nvlink_errors_total{kind!=\"recovery\"}[15m])\n          )\n        >\n          10\n      or\n          sum by (cluster, namespace, job, instance, uuid) (\n            increase(vllm_watch_gpu_nvlink_errors_total{kind=\"recovery\"}[15m])\n          )\n        >\n          0\n    or\n        (\n            max by (cluster, namespace, job, instance, UUID) (\n              increase(DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL[15m])\n            )\n          +\n            max by (cluster, namespace, job, instance, UUID) (\n              increase(DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL[15m])\n            )\n        )\n      >\n        10\n  or\n      max by (cluster, namespace, job, instance, UUID) (\n        increase(DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL[15m])\n      )\n    >\n      0,\n  \"uuid\",\n  \"$1\",\n  \"UUID\",\n  \"(.+)\"\n)",
     "for": "0s",
     "keep_firing_for": "15m",
     "labels": {
      "severity": "warning",
      "owner": "hardware"
     },
     "annotations": {
      "summary": "NVLink errors: {{ $labels.uuid }} on {{ $labels.instance }}",
      "description": "The NVLinks of {{ $labels.uuid }} on {{ $labels.instance }} counted {{ $value | humanize }} errors within 15 min; every collective of a tensor-parallel engine waits for a failing link. Check which link it is with nvidia-smi nvlink -e (First five minutes, step 3), and whether the inter-token latency rose.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGPUNVLinkErrors?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-gpu?viewPanel=167190"
     }
    },
    {
     "alert": "VLLMGPUMemoryNearlyFull",
     "expr": "  (\n        max by (cluster, namespace, job, instance, uuid) (vllm_watch_gpu_memory_used_bytes)\n      /\n        (max by (cluster, namespace, job, instance, uuid) (vllm_watch_gpu_memory_total_bytes) > 0)\n    or\n      (\n          label_replace(\n              sum by (cluster, namespace, job, instance, UUID) (DCGM_FI_DEV_FB_USED) * 1048576\n            /\n              (\n                    sum by (cluster, namespace, job, instance, UUID) (DCGM_FI_DEV_FB_USED) * 1048576\n                  +\n                    sum by (cluster, namespace, job, instance, UUID) (DCGM_FI_DEV_FB_FREE) * 1048576\n                >\n                  0\n              ),\n            \"uuid\",\n            \"$1\",\n            \"UUID\",\n            \"(.+)\"\n          )\n        unless on (uuid)\n          vllm_watch_gpu_info\n      )\n  )\n>\n  0.98",
     "for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "hardware"
     },
     "annotations": {
      "summary": "GPU memory nearly full: {{ $labels.uuid }} on {{ $labels.instance }}",
      "description": "{{ $labels.uuid }} on {{ $labels.instance }} uses {{ $value | humanizePercentage }} of its memory, above 98 % for 5 min; the next allocation may end the engine. Find the processes on this GPU with nvidia-smi (First five minutes, step 3): a second process is the most frequent cause.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGPUMemoryNearlyFull?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-gpu?viewPanel=107194"
     }
    }
   ]
  },
  {
   "name": "vllm-warning-watchers",
   "rules": [
    {
     "alert": "VLLMGatewayReplicaDown",
     "expr": "up{job=~\"gateway\"} == 0 and on (cluster, namespace, job) up{job=~\"gateway\"} == 1",
     "for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "platform"
     },
     "annotations": {
      "summary": "Gateway replica down: {{ $labels.instance }} of job {{ $labels.job }}, others answer",
      "description": "The gateway {{ $labels.instance }} has not answered Prometheus for 5 min, and others of job {{ $labels.job }} do: clients are served with less reserve. With fixed shares, its part of every limit is unused. Check whether it still answers clients (First five minutes, step 1), then read the end of its log and start it again.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMGatewayReplicaDown?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=573577"
     }
    },
    {
     "alert": "VLLMSidecarDown",
     "expr": "up{job=~\"sidecar\"} == 0",
     "for": "2m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Sidecar down: {{ $labels.instance }} of job {{ $labels.job }}",
      "description": "The sidecar {{ $labels.instance }} has not answered Prometheus for 2 min: metrics per team, of the request log and of the GPUs are stale. Serving goes on. Check whether its process runs, read the end of its log, and start it again.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMSidecarDown?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=573577"
     }
    },
    {
     "alert": "VLLMSidecarGone",
     "expr": "  last_over_time(cluster_namespace_job:up:group{job=~\"sidecar\"}[1d])\nunless\n  group by (cluster, namespace, job) (up{job=~\"sidecar\"})",
     "for": "15m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Sidecar targets lost: service discovery finds no sidecar of job {{ $labels.job }}",
      "description": "Job {{ $labels.job }} had a sidecar within the last day; service discovery has found none for 15 min: metrics per team, of the request log and of the GPUs are missing, and no other alert about it can fire. Serving goes on. Check whether it runs. If it was removed on purpose, silence this alert: it ends after a day.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMSidecarGone?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=573577"
     }
    },
    {
     "alert": "VLLMSidecarSourceFailing",
     "expr": "  min by (cluster, namespace, job, instance, pod, kind, source) (\n    vllm_watch_source_up{kind!~\"gpu|checkpoint\"}\n  )\n==\n  0",
     "for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Sidecar source failing: {{ $labels.kind }} {{ $labels.source }} on {{ $labels.instance }}",
      "description": "The sidecar {{ $labels.instance }} has failed to read its {{ $labels.kind }} {{ $labels.source }} for 5 min: the metrics from it are stale. Check the reason (First five minutes, step 1), and read what the sidecar logged when the failure began (step 3).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMSidecarSourceFailing?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=782574"
     }
    },
    {
     "alert": "VLLMCheckpointFailing",
     "expr": "min by (cluster, namespace, job, instance, pod) (vllm_watch_checkpoint_up) == 0",
     "for": "2m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Sidecar cannot save its state: {{ $labels.instance }}",
      "description": "The sidecar {{ $labels.instance }} has failed to write its checkpoint for 2 min; metrics of the request log do not change until it can. Check free space and permissions where its state is kept, and read the error in its log (First five minutes, step 3).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMCheckpointFailing?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=725930"
     }
    },
    {
     "alert": "VLLMShipFailing",
     "expr": "min by (cluster, namespace, job, instance, pod, kind) (vllm_watch_ship_up) == 0",
     "for": "10m",
     "labels": {
      "severity": "warning",
      "owner": "platform"
     },
     "annotations": {
      "summary": "Shipper cannot write: {{ $labels.kind }} fails on {{ $labels.instance }}",
      "description": "The shipper {{ $labels.instance }} has failed to write to its {{ $labels.kind }} for 10 min: the data set lacks new requests. Nothing is lost while the request logs exist. Read the error in its log (First five minutes, step 2), and keep rotated logs until it writes again.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMShipFailing?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=945006"
     }
    },
    {
     "alert": "VLLMDatasetDiffers",
     "expr": "max by (cluster, namespace, job, instance, pod, kind, model_name) (vllm_watch_ship_unexplained) > 0",
     "for": "15m",
     "labels": {
      "severity": "warning",
      "owner": "platform"
     },
     "annotations": {
      "summary": "Data set differs from counters: {{ $labels.kind }} of {{ $labels.model_name }}",
      "description": "On the last complete day, segments, sidecar and engines differ by {{ $value | humanize }} {{ $labels.kind }} of {{ $labels.model_name }} without a known cause, reports {{ $labels.instance }}. Requests are not affected; reports from the data set may be wrong. Run vllm-watch ship verify for the sums (First five minutes, step 2).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMDatasetDiffers?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=411081"
     }
    },
    {
     "alert": "VLLMSpansDropped",
     "expr": "  sum by (cluster, namespace, job, instance, pod, reason) (\n    increase(vllm_watch_spans_dropped_total[5m])\n  )\n>\n  0",
     "for": "10m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Trace spans dropped: {{ $labels.reason }} on {{ $labels.instance }}",
      "description": "The sidecar {{ $labels.instance }} dropped {{ $value | humanize }} spans within 5 min (reason: {{ $labels.reason }}), and has dropped some for 10 min: traces of these requests lack the gateway's span. Check that the collector answers at the configured OTLP endpoint (First five minutes, step 3).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMSpansDropped?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=467473"
     }
    },
    {
     "alert": "VLLMRuleFailing",
     "expr": "  sum by (cluster, namespace, job, instance, pod, rule_group) (\n    increase(prometheus_rule_evaluation_failures_total{rule_group=~\".*;vllm-.*\"}[5m])\n  )\n>\n  0",
     "for": "5m",
     "labels": {
      "severity": "warning",
      "owner": "platform"
     },
     "annotations": {
      "summary": "Rule evaluation failing: {{ $labels.rule_group }} on {{ $labels.instance }}",
      "description": "{{ $value | humanize }} evaluations of the group {{ $labels.rule_group }} have failed on Prometheus {{ $labels.instance }} within 5 min: its alerts cannot fire. Read the error of the failing rule at /rules of this Prometheus (First five minutes, step 2).",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMRuleFailing?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=100531"
     }
    },
    {
     "alert": "VLLMScrapeNearLimit",
     "expr": "      sum by (cluster, namespace, job, instance, pod) (\n        scrape_samples_post_metric_relabeling{job=~\"vllm.*|gateway|sidecar\"}\n      )\n    /\n      (\n          max by (cluster, namespace, job, instance, pod) (scrape_sample_limit{job=~\"vllm.*|gateway|sidecar\"})\n        >\n          0\n      )\n  >\n    0.8\nor\n    sum by (cluster, namespace, job, instance, pod) (\n      increase(prometheus_target_scrapes_exceeded_sample_limit_total[5m])\n    )\n  >\n    0",
     "for": "10m",
     "labels": {
      "severity": "warning",
      "owner": "platform"
     },
     "annotations": {
      "summary": "Scrape near sample_limit: {{ $labels.instance }} of job {{ $labels.job }}",
      "description": "{{ $labels.instance }} of job {{ $labels.job }} has exposed more than 80 % of the samples that sample_limit allows for 10 min; above it Prometheus discards the whole scrape. If {{ $labels.instance }} is Prometheus itself, scrapes are already discarded. Compare the samples with a day ago (First five minutes, step 2), then raise sample_limit.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMScrapeNearLimit?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=455863"
     }
    },
    {
     "alert": "VLLMTeamLabelOverflow",
     "expr": "sum by (cluster, namespace, job, instance, pod) (increase(vllm_watch_teams_overflow_total[5m])) > 0",
     "for": "10m",
     "labels": {
      "severity": "warning",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Team label overflow: sidecar {{ $labels.instance }}",
      "description": "The sidecar {{ $labels.instance }} counted {{ $value | humanize }} requests of teams beyond its limit within 5 min: dashboards and cost reports show them as team __other__. Check which teams have series of their own (First five minutes, step 3), then raise teams.limit in the sidecar's configuration.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMTeamLabelOverflow?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=441687"
     }
    },
    {
     "alert": "VLLMAlertmanagerUnreachable",
     "expr": "    min by (cluster, namespace, job, instance, pod) (prometheus_notifications_alertmanagers_discovered)\n  <\n    1\nor\n    sum by (cluster, namespace, job, instance, pod, alertmanager) (\n      increase(prometheus_notifications_errors_total[5m])\n    )\n  >\n    0",
     "for": "2m",
     "labels": {
      "severity": "warning",
      "owner": "platform"
     },
     "annotations": {
      "summary": "Alertmanager unreachable: Prometheus {{ $labels.instance }}",
      "description": "Prometheus {{ $labels.instance }} has failed to send its alerts to Alertmanager for 2 min: they fire, but nobody is notified. Check that Alertmanager runs and answers on the host of Prometheus; watch the firing alerts by hand until it does.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMAlertmanagerUnreachable?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=509299"
     }
    },
    {
     "alert": "VLLMNotificationsFailing",
     "expr": "  sum by (cluster, namespace, job, instance, pod, integration) (\n    increase(alertmanager_notifications_failed_total{reason!=\"contextCanceled\"}[10m])\n  )\n>\n  0",
     "for": "1m",
     "labels": {
      "severity": "warning",
      "owner": "platform"
     },
     "annotations": {
      "summary": "Notifications failing: {{ $labels.integration }} of Alertmanager {{ $labels.instance }}",
      "description": "Alertmanager {{ $labels.instance }} failed to deliver {{ $value | humanize }} notifications by {{ $labels.integration }} within 10 min: alerts fire, but nobody is notified of them. Read the receiver's error in the Alertmanager log (First five minutes, step 3), and watch the firing alerts by hand until it is fixed.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMNotificationsFailing?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-monitoring-health?viewPanel=54591"
     }
    }
   ]
  },
  {
   "name": "vllm-info-latency",
   "rules": [
    {
     "alert": "VLLMTTFTHigh",
     "expr": "    histogram_quantile(\n      0.95,\n      sum_over_time(cluster_model_name_le:vllm_ttft_seconds_bucket:increase5m[10m])\n    )\n  >=\n    0\n>\n  2.5",
     "for": "5m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "info",
      "owner": "serving"
     },
     "annotations": {
      "summary": "TTFT high: {{ $labels.model_name }}",
      "description": "The p95 time to first token of {{ $labels.model_name }} is {{ $value | humanizeDuration }} over 10 min: one request in twenty waits that long or longer. Check how much of it is queue time (First five minutes, step 3): a queue needs capacity, a long prefill needs shorter prompts or a warm prefix cache.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMTTFTHigh?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=993946"
     }
    },
    {
     "alert": "VLLMInterTokenLatencyHigh",
     "expr": "    histogram_quantile(\n      0.95,\n      sum_over_time(cluster_model_name_le:vllm_inter_token_latency_seconds_bucket:increase5m[10m])\n    )\n  >=\n    0\n>\n  0.1",
     "for": "5m",
     "keep_firing_for": "5m",
     "labels": {
      "severity": "info",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Inter-token latency high: {{ $labels.model_name }}",
      "description": "The p95 time between tokens of {{ $labels.model_name }} is {{ $value | humanizeDuration }} over 10 min, slower than people read. Compare running requests and KV-cache usage with an hour ago: a larger batch or longer contexts slow every step.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMInterTokenLatencyHigh?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=95121"
     }
    },
    {
     "alert": "VLLMLatencyWorseThanLastWeek",
     "expr": "  (\n      label_replace(\n          cluster_model_name:vllm_ttft_seconds:p95_1h\n        >\n          1.15 * cluster_model_name:vllm_ttft_seconds:p95_1h offset 1w,\n        \"figure\",\n        \"time to first token\",\n        \"\",\n        \"\"\n      )\n    or\n      label_replace(\n          cluster_model_name:vllm_inter_token_latency_seconds:p95_1h\n        >\n          1.15 * cluster_model_name:vllm_inter_token_latency_seconds:p95_1h offset 1w,\n        \"figure\",\n        \"time between tokens\",\n        \"\",\n        \"\"\n      )\n  )\nand on (cluster, model_name)\n  (\n      sum_over_time(cluster_model_name:vllm_request_success:increase5m[1h:1m]) / 5 >= 100\n    and\n      sum_over_time(cluster_model_name:vllm_request_success:increase5m[1h:1m] offset 1w) / 5 >= 100\n  )",
     "for": "15m",
     "labels": {
      "severity": "info",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Latency worse than last week: {{ $labels.figure }} of {{ $labels.model_name }}",
      "description": "The p95 {{ $labels.figure }} of {{ $labels.model_name }} is {{ $value | humanizeDuration }} over the last hour, more than 15 % above the same hour of last week. Compare request rate and prompt lengths of the two hours before looking for a cause in the engine.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMLatencyWorseThanLastWeek?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-latency?viewPanel=993946"
     }
    },
    {
     "alert": "VLLMLatencyWorseSinceTuning",
     "expr": "  (\n      (\n          label_replace(\n              cluster_model_name:vllm_ttft_seconds:p95_30m\n            >\n              1.15 * cluster_model_name:vllm_ttft_seconds:p95_30m offset 1h,\n            \"figure\",\n            \"time to first token\",\n            \"\",\n            \"\"\n          )\n        or\n          label_replace(\n              cluster_model_name:vllm_inter_token_latency_seconds:p95_30m\n            >\n              1.15 * cluster_model_name:vllm_inter_token_latency_seconds:p95_30m offset 1h,\n            \"figure\",\n            \"time between tokens\",\n            \"\",\n            \"\"\n          )\n      )\n    and on (cluster, model_name)\n      (\n          sum_over_time(cluster_model_name:vllm_request_success:increase5m[30m:1m]) / 5 >= 100\n        and\n          sum_over_time(cluster_model_name:vllm_request_success:increase5m[30m:1m] offset 1h) / 5 >= 100\n      )\n  )\nand on ()\n  (\n      time() - max(vllm_watch_tuning_event_timestamp_seconds{kind=~\"change|version|config\"}) >= 1800\n    and\n      time() - max(vllm_watch_tuning_event_timestamp_seconds{kind=~\"change|version|config\"}) <= 3600\n  )",
     "for": "0s",
     "labels": {
      "severity": "info",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Latency worse since the last change: {{ $labels.figure }} of {{ $labels.model_name }}",
      "description": "The p95 {{ $labels.figure }} of {{ $labels.model_name }} is {{ $value | humanizeDuration }} over the last half hour, more than 15 % above the half hour before the last change. Roll the change back if every engine has it, and try it on a canary first.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMLatencyWorseSinceTuning?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-tuning?viewPanel=761697"
     }
    },
    {
     "alert": "VLLMMixedHistogramBounds",
     "expr": "    label_replace(\n      count by (cluster, model_name) (\n          count by (cluster, model_name, le) (vllm:time_to_first_token_seconds_bucket{role!=\"prefill\"})\n        < on (cluster, model_name) group_left ()\n          count by (cluster, model_name) (vllm:time_to_first_token_seconds_bucket{le=\"+Inf\",role!=\"prefill\"})\n      ),\n      \"family\",\n      \"time_to_first_token\",\n      \"\",\n      \"\"\n    )\n  or\n    label_replace(\n      count by (cluster, model_name) (\n          count by (cluster, model_name, le) (\n              vllm:inter_token_latency_seconds_bucket{role!=\"prefill\"}\n            or\n              vllm:time_per_output_token_seconds_bucket{role!=\"prefill\"}\n          )\n        < on (cluster, model_name) group_left ()\n          count by (cluster, model_name) (\n              vllm:inter_token_latency_seconds_bucket{le=\"+Inf\",role!=\"prefill\"}\n            or\n              vllm:time_per_output_token_seconds_bucket{le=\"+Inf\",role!=\"prefill\"}\n          )\n      ),\n      \"family\",\n      \"inter_token_latency\",\n      \"\",\n      \"\"\n    )\nor\n  label_replace(\n    count by (cluster, model_name) (\n        count by (cluster, model_name, le) (vllm:e2e_request_latency_seconds_bucket{role!=\"prefill\"})\n      < on (cluster, model_name) group_left ()\n        count by (cluster, model_name) (vllm:e2e_request_latency_seconds_bucket{le=\"+Inf\",role!=\"prefill\"})\n    ),\n    \"family\",\n    \"request_latency\",\n    \"\",\n    \"\"\n  )",
     "for": "30m",
     "labels": {
      "severity": "info",
      "owner": "platform"
     },
     "annotations": {
      "summary": "Histogram buckets differ: {{ $labels.family }} of {{ $labels.model_name }}",
      "description": "Engines of {{ $labels.model_name }} have differed in {{ $value | humanize }} bucket bounds of {{ $labels.family }} for 30 min: percentiles are estimated from the bounds that all of them share. Start all engines of the model with the same --custom-histogram-buckets.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMMixedHistogramBounds?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-latency?viewPanel=177163"
     }
    }
   ]
  },
  {
   "name": "vllm-info-cache",
   "rules": [
    {
     "alert": "VLLMAcceptanceLow",
     "expr": "    sum by (cluster, model_name) (rate(vllm:spec_decode_num_accepted_tokens_total[30m]))\n  /\n    (sum by (cluster, model_name) (rate(vllm:spec_decode_num_draft_tokens_total[30m])) > 0)\n<\n  0.4",
     "for": "10m",
     "labels": {
      "severity": "info",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Speculative decoding inefficient: {{ $labels.model_name }}",
      "description": "{{ $value | humanizePercentage }} of the tokens drafted for {{ $labels.model_name }} were accepted over 30 min: drafting and verifying cost about what they save. Check the acceptance by position and the batch size (First five minutes, steps 1 and 3) before turning speculation off.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMAcceptanceLow?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-tuning-options?viewPanel=119464"
     }
    }
   ]
  },
  {
   "name": "vllm-info-traffic",
   "rules": [
    {
     "alert": "VLLMAnswersCutOff",
     "expr": "      sum by (cluster, model_name) (\n        sum_over_time(\n          cluster_model_name_finished_reason:vllm_request_success:increase5m{finished_reason=\"length\"}[30m]\n        )\n      )\n    /\n      (sum_over_time(cluster_model_name:vllm_request_success:increase5m[30m]) > 0)\n  >\n    0.3\nand\n    sum by (cluster, model_name) (\n        sum_over_time(\n          cluster_model_name_finished_reason:vllm_request_success:increase5m{finished_reason=\"length\"}[30m:1m]\n        )\n      /\n        5\n    )\n  >=\n    5",
     "for": "15m",
     "labels": {
      "severity": "info",
      "owner": "serving"
     },
     "annotations": {
      "summary": "Outputs truncated: {{ $labels.model_name }}",
      "description": "{{ $value | humanizePercentage }} of the outputs of {{ $labels.model_name }} were cut off by max_tokens or the context length over 30 min. Find the team they belong to (First five minutes, step 1), and compare its max_tokens with the length of its outputs.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMAnswersCutOff?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-tuning-options?viewPanel=917356"
     }
    }
   ]
  },
  {
   "name": "vllm-info-watchers",
   "rules": [
    {
     "alert": "VLLMWatchdog",
     "expr": "vector(1) > 0",
     "for": "0s",
     "labels": {
      "severity": "none",
      "owner": "platform"
     },
     "annotations": {
      "summary": "Watchdog: alerting works from end to end",
      "description": "This alert always fires. If it no longer arrives, Prometheus, Alertmanager or the path to its receiver is broken. Check that Prometheus runs and shows it as firing (First five minutes, step 1), then that Alertmanager has it.",
      "runbook_url": "http://127.0.0.1:9402/runbooks/VLLMWatchdog?live=1{{ range $name, $value := $labels }}{{ if ne $name \"__name__\" }}&{{ $name }}={{ $value | urlquery }}{{ end }}{{ end }}",
      "dashboard_url": "http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel=188949"
     }
    }
   ]
  }
 ],
 "recorded": [
  {
   "name": "vllm-recorded-growth",
   "interval": "1m",
   "rules": [
    {
     "record": "cluster_namespace_job:up:group",
     "expr": "group by (cluster, namespace, job) (up{job=~\"vllm.*|gateway|sidecar\"})"
    },
    {
     "record": "cluster_namespace_job_instance_model_name:vllm_num_requests_running:group",
     "expr": "group by (cluster, namespace, job, instance, model_name) (vllm:num_requests_running{job=~\"vllm.*\"})"
    },
    {
     "record": "cluster_namespace_job_instance_pod:process_age_seconds:min",
     "expr": "min by (cluster, namespace, job, instance, pod) (\n  timestamp(process_start_time_seconds{job=~\"vllm.*\"}) - process_start_time_seconds{job=~\"vllm.*\"}\n)"
    },
    {
     "record": "cluster_namespace_job_instance_model_name:vllm_queue_time_seconds:p95_5m",
     "expr": "    label_replace(\n        histogram_quantile(\n          0.95,\n          sum by (cluster, namespace, job, instance, model_name, le) (\n            rate(vllm:request_queue_time_seconds_bucket{role!=\"decode\"}[5m])\n          )\n        )\n      >=\n        histogram_quantile(\n          1,\n            group by (cluster, namespace, job, instance, model_name, le) (\n              vllm:request_queue_time_seconds_bucket{le=\"+Inf\",role!=\"decode\"}\n            )\n          or\n              (\n                group by (cluster, namespace, job, instance, model_name, le) (\n                  vllm:request_queue_time_seconds_bucket{role!=\"decode\"}\n                )\n              )\n            *\n              0\n        ),\n      \"bound\",\n      \">\",\n      \"\",\n      \"\"\n    )\n  or on (cluster, namespace, job, instance, model_name)\n      histogram_quantile(\n        0.95,\n        sum by (cluster, namespace, job, instance, model_name, le) (\n          rate(vllm:request_queue_time_seconds_bucket{role!=\"decode\"}[5m])\n        )\n      )\n    >\n      histogram_quantile(\n        1,\n        group by (cluster, namespace, job, instance, model_name, le) (\n          vllm:request_queue_time_seconds_bucket{role!=\"decode\"}\n        )\n      )\nor on (cluster, namespace, job, instance, model_name)\n  label_replace(\n        histogram_quantile(\n          1,\n          group by (cluster, namespace, job, instance, model_name, le) (\n            vllm:request_queue_time_seconds_bucket{role!=\"decode\"}\n          )\n        )\n      >=\n        0\n    and on (cluster, namespace, job, instance, model_name)\n        sum by (cluster, namespace, job, instance, model_name) (\n          rate(vllm:request_queue_time_seconds_count{role!=\"decode\"}[5m])\n        )\n      >\n        0,\n    \"bound\",\n    \"<\",\n    \"\",\n    \"\"\n  )"
    },
    {
     "record": "cluster_model_name_le:vllm_ttft_seconds_bucket:increase5m",
     "expr": "  (\n        sum by (cluster, model_name, le) (increase(vllm_watch_ttft_seconds_bucket[5m]))\n      and\n          count by (cluster, model_name, le) (vllm_watch_ttft_seconds_bucket)\n        == on (cluster, model_name) group_left ()\n          count by (cluster, model_name) (vllm_watch_ttft_seconds_bucket{le=\"+Inf\"})\n    and on (cluster, model_name)\n      vllm:num_requests_running{role=\"prefill\"}\n  )\nor\n      sum by (cluster, model_name, le) (\n        increase(vllm:time_to_first_token_seconds_bucket{role!=\"prefill\"}[5m])\n      )\n    and\n        count by (cluster, model_name, le) (vllm:time_to_first_token_seconds_bucket{role!=\"prefill\"})\n      == on (cluster, model_name) group_left ()\n        count by (cluster, model_name) (vllm:time_to_first_token_seconds_bucket{le=\"+Inf\",role!=\"prefill\"})\n  unless on (cluster, model_name)\n    (\n          sum by (cluster, model_name, le) (increase(vllm_watch_ttft_seconds_bucket[5m]))\n        and\n            count by (cluster, model_name, le) (vllm_watch_ttft_seconds_bucket)\n          == on (cluster, model_name) group_left ()\n            count by (cluster, model_name) (vllm_watch_ttft_seconds_bucket{le=\"+Inf\"})\n      and on (cluster, model_name)\n        vllm:num_requests_running{role=\"prefill\"}\n    )"
    },
    {
     "record": "cluster_model_name_le:vllm_inter_token_latency_seconds_bucket:increase5m",
     "expr": "  sum by (cluster, model_name, le) (\n      increase(vllm:inter_token_latency_seconds_bucket{role!=\"prefill\"}[5m])\n    or\n      increase(vllm:time_per_output_token_seconds_bucket{role!=\"prefill\"}[5m])\n  )\nand\n    count by (cluster, model_name, le) (\n        vllm:inter_token_latency_seconds_bucket{role!=\"prefill\"}\n      or\n        vllm:time_per_output_token_seconds_bucket{role!=\"prefill\"}\n    )\n  == on (cluster, model_name) group_left ()\n    count by (cluster, model_name) (\n        vllm:inter_token_latency_seconds_bucket{le=\"+Inf\",role!=\"prefill\"}\n      or\n        vllm:time_per_output_token_seconds_bucket{le=\"+Inf\",role!=\"prefill\"}\n    )"
    },
    {
     "record": "cluster_model_name:vllm_prefix_cache_hits:increase5m",
     "expr": "sum by (cluster, model_name) (\n    increase(vllm:prefix_cache_hits_total{role!=\"decode\"}[5m])\n  or\n    increase(vllm:gpu_prefix_cache_hits_total{role!=\"decode\"}[5m])\n)"
    },
    {
     "record": "cluster_model_name:vllm_prefix_cache_queries:increase5m",
     "expr": "sum by (cluster, model_name) (\n    increase(vllm:prefix_cache_queries_total{role!=\"decode\"}[5m])\n  or\n    increase(vllm:gpu_prefix_cache_queries_total{role!=\"decode\"}[5m])\n)"
    },
    {
     "record": "cluster_model_name_finished_reason:vllm_request_success:increase5m",
     "expr": "sum by (cluster, model_name, finished_reason) (\n  increase(vllm:request_success_total{role!=\"prefill\"}[5m])\n)"
    },
    {
     "record": "cluster_model_name:vllm_request_success:increase5m",
     "expr": "sum by (cluster, model_name) (cluster_model_name_finished_reason:vllm_request_success:increase5m)"
    },
    {
     "record": "cluster_model_name_outcome:vllm_watch_requests:increase5m",
     "expr": "sum by (cluster, model_name, outcome) (increase(vllm_watch_requests_total[5m]))"
    },
    {
     "record": "cluster_namespace_job_instance_pod_model_name:vllm_http_ended:increase5m",
     "expr": "      sum by (cluster, namespace, job, instance, pod) (\n        increase(http_requests_total{handler=~\"/v1/.*\",method=\"POST\",status=~\"2..|5..\"}[5m])\n      )\n    * on (cluster, namespace, job, instance, pod) group_right ()\n      group by (cluster, namespace, job, instance, model_name, pod) (vllm:num_requests_running)\n  unless on (cluster, model_name)\n    sum by (cluster, model_name) (cluster_model_name_outcome:vllm_watch_requests:increase5m)\nunless on (cluster, model_name)\n  vllm_watch_reconcile_settled_timestamp_seconds"
    },
    {
     "record": "cluster_namespace_job_instance_pod_model_name:vllm_http_failed:increase5m",
     "expr": "  (\n      clamp_min(\n            sum by (cluster, namespace, job, instance, pod) (\n              increase(http_requests_total{handler=~\"/v1/.*\",method=\"POST\",status=~\"5..\"}[5m])\n            )\n          * on (cluster, namespace, job, instance, pod) group_right ()\n            group by (cluster, namespace, job, instance, model_name, pod) (vllm:num_requests_running)\n        -\n          (\n              sum by (cluster, namespace, job, instance, model_name, pod) (\n                increase(vllm:admission_rejections_total[5m])\n              )\n            or\n                  sum by (cluster, namespace, job, instance, pod) (\n                    increase(http_requests_total{handler=~\"/v1/.*\",method=\"POST\",status=~\"5..\"}[5m])\n                  )\n                * on (cluster, namespace, job, instance, pod) group_right ()\n                  group by (cluster, namespace, job, instance, model_name, pod) (vllm:num_requests_running)\n              *\n                0\n          ),\n        0\n      )\n    or\n      cluster_namespace_job_instance_pod_model_name:vllm_http_ended:increase5m * 0\n  )\nand\n  cluster_namespace_job_instance_pod_model_name:vllm_http_ended:increase5m"
    },
    {
     "record": "cluster_model_name:vllm_ttft_seconds:p95_30m",
     "expr": "  histogram_quantile(\n    0.95,\n    sum_over_time(cluster_model_name_le:vllm_ttft_seconds_bucket:increase5m[30m])\n  )\n>=\n  0"
    },
    {
     "record": "cluster_model_name:vllm_ttft_seconds:p95_1h",
     "expr": "  histogram_quantile(\n    0.95,\n    sum_over_time(cluster_model_name_le:vllm_ttft_seconds_bucket:increase5m[1h])\n  )\n>=\n  0"
    },
    {
     "record": "cluster_model_name:vllm_inter_token_latency_seconds:p95_30m",
     "expr": "  histogram_quantile(\n    0.95,\n    sum_over_time(cluster_model_name_le:vllm_inter_token_latency_seconds_bucket:increase5m[30m])\n  )\n>=\n  0"
    },
    {
     "record": "cluster_model_name:vllm_inter_token_latency_seconds:p95_1h",
     "expr": "  histogram_quantile(\n    0.95,\n    sum_over_time(cluster_model_name_le:vllm_inter_token_latency_seconds_bucket:increase5m[1h])\n  )\n>=\n  0"
    },
    {
     "record": "cluster:vllm_request_success:increase30m",
     "expr": "sum by (cluster) (increase(vllm:request_success_total{role!=\"prefill\"}[30m]))"
    },
    {
     "record": "cluster_outcome:vllm_watch_requests:increase30m",
     "expr": "sum by (cluster, outcome) (increase(vllm_watch_requests_total[30m]))"
    }
   ]
  },
  {
   "name": "vllm-recorded-slo",
   "interval": "1m",
   "rules": [
    {
     "record": "cluster_model_name:vllm_slo_ttft_bad:increase5m",
     "expr": "  sum by (cluster, model_name) (cluster_model_name_le:vllm_ttft_seconds_bucket:increase5m{le=\"+Inf\"})\n-\n  sum by (cluster, model_name) (cluster_model_name_le:vllm_ttft_seconds_bucket:increase5m{le=\"2.5\"})"
    },
    {
     "record": "cluster_model_name:vllm_slo_ttft_all:increase5m",
     "expr": "  sum by (cluster, model_name) (cluster_model_name_le:vllm_ttft_seconds_bucket:increase5m{le=\"+Inf\"})\nand\n  sum by (cluster, model_name) (cluster_model_name_le:vllm_ttft_seconds_bucket:increase5m{le=\"2.5\"})"
    },
    {
     "record": "cluster_model_name:vllm_slo_inter_token_bad:increase5m",
     "expr": "  sum by (cluster, model_name) (\n    cluster_model_name_le:vllm_inter_token_latency_seconds_bucket:increase5m{le=\"+Inf\"}\n  )\n-\n  sum by (cluster, model_name) (\n    cluster_model_name_le:vllm_inter_token_latency_seconds_bucket:increase5m{le=\"0.1\"}\n  )"
    },
    {
     "record": "cluster_model_name:vllm_slo_inter_token_all:increase5m",
     "expr": "  sum by (cluster, model_name) (\n    cluster_model_name_le:vllm_inter_token_latency_seconds_bucket:increase5m{le=\"+Inf\"}\n  )\nand\n  sum by (cluster, model_name) (\n    cluster_model_name_le:vllm_inter_token_latency_seconds_bucket:increase5m{le=\"0.1\"}\n  )"
    },
    {
     "record": "cluster_model_name:vllm_slo_success_bad:increase5m",
     "expr": "(\n      sum by (cluster, model_name) (\n        cluster_model_name_outcome:vllm_watch_requests:increase5m{outcome=~\"upstream_error|timeout\"}\n      )\n    or\n        sum by (cluster, model_name) (\n          cluster_model_name_outcome:vllm_watch_requests:increase5m{outcome!~\"rejected|client_abort\"}\n        )\n      *\n        0\n  or\n    sum by (cluster, model_name) (\n      cluster_namespace_job_instance_pod_model_name:vllm_http_failed:increase5m\n    )\n)"
    },
    {
     "record": "cluster_model_name:vllm_slo_success_all:increase5m",
     "expr": "  sum by (cluster, model_name) (\n    cluster_model_name_outcome:vllm_watch_requests:increase5m{outcome!~\"rejected|client_abort\"}\n  )\nor\n  sum by (cluster, model_name) (\n    cluster_namespace_job_instance_pod_model_name:vllm_http_ended:increase5m\n  )"
    }
   ]
  },
  {
   "name": "vllm-recorded-hours",
   "interval": "5m",
   "rules": [
    {
     "record": "cluster_model_name:vllm_request_success:increase1h",
     "expr": "sum_over_time(cluster_model_name:vllm_request_success:increase5m[1h:1m]) / 5"
    },
    {
     "record": "cluster_model_name:vllm_prefix_cache_hits:increase1h",
     "expr": "sum_over_time(cluster_model_name:vllm_prefix_cache_hits:increase5m[1h:1m]) / 5"
    },
    {
     "record": "cluster_model_name:vllm_prefix_cache_queries:increase1h",
     "expr": "sum_over_time(cluster_model_name:vllm_prefix_cache_queries:increase5m[1h:1m]) / 5"
    },
    {
     "record": "cluster_model_name_outcome:vllm_watch_requests:increase1h",
     "expr": "sum_over_time(cluster_model_name_outcome:vllm_watch_requests:increase5m[1h:1m]) / 5"
    },
    {
     "record": "cluster_model_name:vllm_slo_ttft_bad:increase1h",
     "expr": "sum_over_time(cluster_model_name:vllm_slo_ttft_bad:increase5m[1h:1m]) / 5"
    },
    {
     "record": "cluster_model_name:vllm_slo_ttft_all:increase1h",
     "expr": "sum_over_time(cluster_model_name:vllm_slo_ttft_all:increase5m[1h:1m]) / 5"
    },
    {
     "record": "cluster_model_name:vllm_slo_inter_token_bad:increase1h",
     "expr": "sum_over_time(cluster_model_name:vllm_slo_inter_token_bad:increase5m[1h:1m]) / 5"
    },
    {
     "record": "cluster_model_name:vllm_slo_inter_token_all:increase1h",
     "expr": "sum_over_time(cluster_model_name:vllm_slo_inter_token_all:increase5m[1h:1m]) / 5"
    },
    {
     "record": "cluster_model_name:vllm_slo_success_bad:increase1h",
     "expr": "sum_over_time(cluster_model_name:vllm_slo_success_bad:increase5m[1h:1m]) / 5"
    },
    {
     "record": "cluster_model_name:vllm_slo_success_all:increase1h",
     "expr": "sum_over_time(cluster_model_name:vllm_slo_success_all:increase5m[1h:1m]) / 5"
    },
    {
     "record": "cluster_team_outcome:vllm_watch_requests:increase1h",
     "expr": "sum_over_time(cluster_team_outcome:vllm_watch_requests:increase5m[1h:1m]) / 5"
    },
    {
     "record": "cluster_team_type:vllm_watch_tokens:increase1h",
     "expr": "sum_over_time(cluster_team_type:vllm_watch_tokens:increase5m[1h:1m]) / 5"
    },
    {
     "record": "cluster_team_basis_currency:vllm_watch_cost:increase1h",
     "expr": "sum_over_time(cluster_team_basis_currency:vllm_watch_cost:increase5m[1h:1m]) / 5"
    }
   ]
  },
  {
   "name": "vllm-recorded-figures",
   "interval": "1m",
   "rules": [
    {
     "record": "model_name:vllm_ttft_seconds:p95_5m",
     "expr": "  histogram_quantile(\n    0.95,\n    sum by (model_name, le) (cluster_model_name_le:vllm_ttft_seconds_bucket:increase5m)\n  )\n>=\n  0"
    },
    {
     "record": "model_name:vllm_inter_token_latency_seconds:p95_5m",
     "expr": "  histogram_quantile(\n    0.95,\n    sum by (model_name, le) (cluster_model_name_le:vllm_inter_token_latency_seconds_bucket:increase5m)\n  )\n>=\n  0"
    },
    {
     "record": "model_name:vllm_prefix_cache_hits:ratio_5m",
     "expr": "  sum by (model_name) (cluster_model_name:vllm_prefix_cache_hits:increase5m)\n/\n  (sum by (model_name) (cluster_model_name:vllm_prefix_cache_queries:increase5m) > 0)"
    },
    {
     "record": "model_name:vllm_generation_tokens:rate5m",
     "expr": "sum by (model_name) (rate(vllm:generation_tokens_total{role!=\"prefill\"}[5m]))"
    },
    {
     "record": "model_name:vllm_prompt_tokens:rate5m",
     "expr": "sum by (model_name) (rate(vllm:prompt_tokens_total{role!=\"prefill\"}[5m]))"
    }
   ]
  },
  {
   "name": "vllm-recorded-fleet",
   "interval": "1m",
   "rules": [
    {
     "record": "cluster_namespace_model_name:vllm_engines:count",
     "expr": "count by (cluster, namespace, model_name) (\n  group by (cluster, namespace, job, instance, model_name) (vllm:num_requests_running)\n)"
    },
    {
     "record": "cluster_namespace_model_name:vllm_requests_running:sum",
     "expr": "sum by (cluster, namespace, model_name) (vllm:num_requests_running)"
    },
    {
     "record": "cluster_namespace_model_name:vllm_requests_waiting:sum",
     "expr": "sum by (cluster, namespace, model_name) (vllm:num_requests_waiting)"
    },
    {
     "record": "cluster_namespace_model_name:vllm_kv_cache_usage:max",
     "expr": "max by (cluster, namespace, model_name) (vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc)"
    },
    {
     "record": "cluster_namespace_model_name:vllm_queue_time_seconds:max_p95_5m",
     "expr": "max without (job, instance) (\n  cluster_namespace_job_instance_model_name:vllm_queue_time_seconds:p95_5m\n)"
    },
    {
     "record": "cluster_namespace_model_name:vllm_generation_tokens:rate5m",
     "expr": "sum by (cluster, namespace, model_name) (rate(vllm:generation_tokens_total{role!=\"prefill\"}[5m]))"
    },
    {
     "record": "cluster_namespace_model_name:vllm_prompt_tokens:rate5m",
     "expr": "sum by (cluster, namespace, model_name) (rate(vllm:prompt_tokens_total{role!=\"prefill\"}[5m]))"
    },
    {
     "record": "cluster_namespace_model_name:vllm_preemptions:rate5m",
     "expr": "sum by (cluster, namespace, model_name) (rate(vllm:num_preemptions_total[5m]))"
    },
    {
     "record": "cluster_team:vllm_watch_ttft_seconds:p95_5m",
     "expr": "  histogram_quantile(0.95, sum by (cluster, team) (rate(vllm_watch_ttft_seconds[5m]))) >= 0\nor\n    (\n          label_replace(\n              histogram_quantile(\n                0.95,\n                  sum by (cluster, team, le) (rate(vllm_watch_ttft_seconds_bucket[5m]))\n                and\n                    count by (cluster, team, le) (vllm_watch_ttft_seconds_bucket)\n                  == on (cluster, team) group_left ()\n                    count by (cluster, team) (vllm_watch_ttft_seconds_bucket{le=\"+Inf\"})\n              )\n            >=\n              histogram_quantile(\n                1,\n                  group by (cluster, team, le) (vllm_watch_ttft_seconds_bucket{le=\"+Inf\"})\n                or\n                    (\n                        count by (cluster, team, le) (vllm_watch_ttft_seconds_bucket)\n                      == on (cluster, team) group_left ()\n                        count by (cluster, team) (vllm_watch_ttft_seconds_bucket{le=\"+Inf\"})\n                    )\n                  *\n                    0\n              ),\n            \"bound\",\n            \">\",\n            \"\",\n            \"\"\n          )\n        or on (cluster, team)\n            histogram_quantile(\n              0.95,\n                sum by (cluster, team, le) (rate(vllm_watch_ttft_seconds_bucket[5m]))\n              and\n                  count by (cluster, team, le) (vllm_watch_ttft_seconds_bucket)\n                == on (cluster, team) group_left ()\n                  count by (cluster, team) (vllm_watch_ttft_seconds_bucket{le=\"+Inf\"})\n            )\n          >\n            histogram_quantile(\n              1,\n                count by (cluster, team, le) (vllm_watch_ttft_seconds_bucket)\n              == on (cluster, team) group_left ()\n                count by (cluster, team) (vllm_watch_ttft_seconds_bucket{le=\"+Inf\"})\n            )\n      or on (cluster, team)\n        label_replace(\n              histogram_quantile(\n                1,\n                  count by (cluster, team, le) (vllm_watch_ttft_seconds_bucket)\n                == on (cluster, team) group_left ()\n                  count by (cluster, team) (vllm_watch_ttft_seconds_bucket{le=\"+Inf\"})\n              )\n            >=\n              0\n          and on (cluster, team)\n            sum by (cluster, team) (rate(vllm_watch_ttft_seconds_count[5m])) > 0,\n          \"bound\",\n          \"<\",\n          \"\",\n          \"\"\n        )\n    )\n  unless on (cluster, team)\n    histogram_quantile(0.95, sum by (cluster, team) (rate(vllm_watch_ttft_seconds[5m])))"
    },
    {
     "record": "cluster_team_outcome:vllm_watch_requests:increase5m",
     "expr": "sum by (cluster, team, outcome) (increase(vllm_watch_requests_total[5m]))"
    },
    {
     "record": "cluster_team_type:vllm_watch_tokens:increase5m",
     "expr": "sum by (cluster, team, type) (increase(vllm_watch_tokens_total[5m]))"
    },
    {
     "record": "cluster_team_basis_currency:vllm_watch_cost:increase5m",
     "expr": "sum by (cluster, team, basis, currency) (increase(vllm_watch_cost_total[5m]))"
    }
   ]
  }
 ]
}
