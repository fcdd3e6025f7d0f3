{{/* Names of what belongs to a release; a release called select-service is not called it twice. */}}
{{- define "select-service.fullname" -}}
{{- if contains "select-service" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-select-service" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* By these pods are found. */}}
{{- define "select-service.selector" -}}
app.kubernetes.io/name: select-service
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "select-service.labels" -}}
{{ include "select-service.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "select-service.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What holds for the mode: leaving and resources. */}}
{{- define "select-service.leaving" -}}
{{- if eq .Values.mode "sidecar" }}{{ toYaml .Values.sidecar.leaving }}{{ else }}{{ toYaml .Values.leaving }}{{ end -}}
{{- end -}}

{{/* Where probes, Prometheus and replicas come in: beside a router that is no way to the API. */}}
{{- define "select-service.port" -}}
{{- ternary "side" "http" (eq .Values.mode "sidecar") -}}
{{- end -}}

{{- define "select-service.portNumber" -}}
{{- ternary 8093 8092 (eq .Values.mode "sidecar") -}}
{{- end -}}

{{/* Of the pod: no root, nothing that root may. */}}
{{- define "select-service.podSpec" -}}
{{- $leaving := include "select-service.leaving" . | fromYaml -}}
serviceAccountName: {{ include "select-service.fullname" . }}
# longer than --leave-grace-s and --shutdown-timeout-s together
terminationGracePeriodSeconds: {{ add $leaving.grace $leaving.slack }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "select-service.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The container, as an item of `containers`. */}}
{{- define "select-service.container" -}}
{{- $leaving := include "select-service.leaving" . | fromYaml -}}
{{- $sidecar := eq .Values.mode "sidecar" -}}
{{- $unix := and $sidecar (eq .Values.sidecar.listen "unix") -}}
{{- $port := include "select-service.port" . -}}
- name: select-service
  image: {{ include "select-service.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    {{- if $unix }}
    - --uds=/run/select-service/select.sock
    {{- else if $sidecar }}
    - --host=127.0.0.1
    {{- end }}
    {{- if not $unix }}
    - --port=8092
    {{- end }}
    {{- if $sidecar }}
    - --side-port=8093
    {{- end }}
    - --log-format=json
    - --replica-sync-port=9092
    - --kubernetes-replicas=kubernetes.io/service-name={{ include "select-service.fullname" . }}-peers
    - --kubernetes-workers={{ .Values.workers }}
    {{- if not $sidecar }}
    # the ClusterIP leads to replicas that are ready, never to this one while it starts
    - --indexer-peers=http://{{ include "select-service.fullname" . }}:8092
    {{- end }}
    # The drain begins with preStop, or SIGTERM: /ready is 503, replicas are told, every answer
    # closes its connection, and all is served meanwhile. The notice is the time it takes until
    # nobody is led here any more.
    - --leave-notice-s={{ $leaving.notice }}
    - --leave-grace-s={{ $leaving.grace }}
    {{- with .Values.extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    - name: POD_IP
      valueFrom:
        fieldRef:
          fieldPath: status.podIP
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  # the news travels before SIGTERM comes: see --leave-notice-s
  lifecycle:
    preStop:
      exec:
        command: [select-service, leave, --wait-s={{ $leaving.notice }}]
  ports:
    - name: {{ $port }}
      containerPort: {{ include "select-service.portNumber" . }}
    - name: replica-sync
      containerPort: 9092
  # /health never depends on peers or workers; the port opens after --recovery-hold-s at the latest,
  # which the start-up probe must outlast
  startupProbe:
    httpGet:
      path: /health
      port: {{ $port }}
    periodSeconds: 2
    failureThreshold: 30
  livenessProbe:
    httpGet:
      path: /health
      port: {{ $port }}
    periodSeconds: 10
    timeoutSeconds: 3
  # no workers needed: requests that find none are the demand that wakes a fleet at zero
  readinessProbe:
    httpGet:
      path: /ready?for=traffic
      port: {{ $port }}
    periodSeconds: 2
    timeoutSeconds: 2
    failureThreshold: 2
  resources:
    {{- toYaml (ternary .Values.sidecar.resources .Values.resources $sidecar) | nindent 4 }}
  securityContext:
    {{- include "select-service.containerSecurity" . | nindent 4 }}
  {{- if or $unix .Values.extraVolumeMounts }}
  volumeMounts:
    {{- if $unix }}
    - name: select-service-socket
      mountPath: /run/select-service
    {{- end }}
    {{- with .Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
{{- end -}}

{{/* The pod's volumes, the key included; nothing where there are none. */}}
{{- define "select-service.volumes" -}}
{{- $unix := and (eq .Values.mode "sidecar") (eq .Values.sidecar.listen "unix") -}}
{{- if or $unix .Values.extraVolumes }}
volumes:
  {{- if $unix }}
  - name: select-service-socket
    emptyDir:
      medium: Memory
      sizeLimit: 1Mi
  {{- end }}
  {{- with .Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}
