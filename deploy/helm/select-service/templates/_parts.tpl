{{/*
The parts that a chart which depends on this one may include, with its own scope: they find ours
among its dependencies, under whatever alias. With several of ours, pass the one that is meant:
index .Subcharts "alias".
*/}}
{{- define "select-service.fullname" -}}{{ include "select-service.ours" (list "fullname" .) }}{{- end -}}
{{- define "select-service.selector" -}}{{ include "select-service.ours" (list "selector" .) }}{{- end -}}
{{- define "select-service.podSpec" -}}{{ include "select-service.ours" (list "podSpec" .) }}{{- end -}}
{{- define "select-service.container" -}}{{ include "select-service.ours" (list "container" .) }}{{- end -}}
{{- define "select-service.volumes" -}}{{ include "select-service.ours" (list "volumes" .) }}{{- end -}}
{{- define "select-service.socketMount" -}}{{ include "select-service.ours" (list "socketMount" .) }}{{- end -}}
{{- define "select-service.address" -}}{{ include "select-service.ours" (list "address" .) }}{{- end -}}

{{- define "select-service.ours" -}}
{{- $scope := index . 1 -}}
{{- range $name, $one := $scope.Subcharts -}}
{{- if index ($one.Chart.Annotations | default dict) "select-service.io/chart" -}}{{- $scope = $one -}}{{- end -}}
{{- end -}}
{{- include (printf "select-service.parts.%s" (index . 0)) $scope -}}
{{- end -}}

{{/* Names of what belongs to a release; a release called select-service is not called it twice. */}}
{{- define "select-service.parts.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "select-service" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-select-service" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/*
By these pods are found. Beside a router they are the pod of another chart, which has the usual labels
for itself: its Deployment finds it by them.
*/}}
{{- define "select-service.parts.selector" -}}
{{- if eq .Values.mode "sidecar" -}}
select-service.io/replica-of: {{ include "select-service.fullname" . }}
{{- else -}}
{{ include "select-service.names" . }}
{{- end -}}
{{- end -}}

{{- define "select-service.names" -}}
app.kubernetes.io/name: select-service
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "select-service.labels" -}}
{{ include "select-service.names" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Of pods: what finds them goes before what is given. */}}
{{- define "select-service.podLabels" -}}
{{- merge (include "select-service.selector" . | fromYaml) .Values.podLabels | toYaml -}}
{{- end -}}

{{/* One that recreates has no rolling update to speak of. */}}
{{- define "select-service.strategy" -}}
{{- $strategy := .Values.strategy | default dict -}}
{{- if eq ($strategy.type | default "") "Recreate" -}}
type: Recreate
{{- else -}}
{{- toYaml $strategy -}}
{{- end -}}
{{- end -}}

{{- define "select-service.image" -}}
{{- with .Values.image -}}
{{- $repository := required "image.repository is required: build the image, push it, and name where it is, as in --set image.repository=registry.example.com/select-service" .repository -}}
{{- if .digest -}}
{{ $repository }}@{{ .digest }}
{{- else -}}
{{ $repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "select-service.account" -}}
{{- with .Values.serviceAccount -}}
{{- .name | default (ternary (include "select-service.fullname" $) "default" .create) -}}
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

{{/* "https" where TCP ports speak TLS, by tls.secretName or by a flag: the side port as any. */}}
{{- define "select-service.scheme" -}}
{{- $tls := .Values.tls.secretName -}}
{{- range .Values.extraArgs }}{{ if hasPrefix "--tls-cert" . }}{{ $tls = "by a flag" }}{{ end }}{{ end -}}
{{- ternary "https" "http" (not (not $tls)) -}}
{{- end -}}

{{/* Where the router asks. */}}
{{- define "select-service.parts.address" -}}
{{- $loopback := printf "%s://localhost:8092" (include "select-service.scheme" .) -}}
{{- ternary "unix:/run/select-service/select.sock" $loopback (eq .Values.sidecar.listen "unix") -}}
{{- end -}}

{{/* As an item of the router's volumeMounts, where it asks over a Unix socket. */}}
{{- define "select-service.parts.socketMount" -}}
- name: select-service-socket
  mountPath: /run/select-service
{{- end -}}

{{/* Of the pod: no root, nothing that root may. Who it is, the image and the cluster say. */}}
{{- define "select-service.parts.podSpec" -}}
{{- $leaving := include "select-service.leaving" . | fromYaml -}}
serviceAccountName: {{ include "select-service.account" . }}
# longer than --leave-grace-s and --shutdown-timeout-s together
terminationGracePeriodSeconds: {{ add $leaving.grace $leaving.slack }}
securityContext:
  runAsNonRoot: true
  seccompProfile:
    type: RuntimeDefault
  {{- with .Values.podSecurityContext }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- with .Values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "select-service.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* "yes" where every caller must have a certificate, by a flag; the kubelet has none. */}}
{{- define "select-service.wantsCertificates" -}}
{{- range .Values.extraArgs }}{{ if hasPrefix "--tls-client-ca" . }}yes{{ end }}{{ end -}}
{{- end -}}

{{/*
A probe: name, path, scope. One with a handler of its own (exec, httpGet, …) keeps it. Where callers
need certificates, the port is connected to: it opens when recoveries are over.
*/}}
{{- define "select-service.probe" -}}
{{- $scope := index . 2 -}}
{{- with index ($scope.Values.probes | default dict) (index . 0) -}}
{{- $handled := or .exec .httpGet .tcpSocket .grpc -}}
{{ index $ 0 }}Probe:
  {{- if and (not $handled) (include "select-service.wantsCertificates" $scope) }}
  tcpSocket:
    port: {{ include "select-service.port" $scope }}
  {{- else if not $handled }}
  httpGet:
    path: {{ index $ 1 }}
    port: {{ include "select-service.port" $scope }}
    {{- if eq (include "select-service.scheme" $scope) "https" }}
    scheme: HTTPS
    {{- end }}
  {{- end }}
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* The container, as an item of `containers`. */}}
{{- define "select-service.parts.container" -}}
{{- $leaving := include "select-service.leaving" . | fromYaml -}}
{{- $sidecar := eq .Values.mode "sidecar" -}}
{{- $unix := and $sidecar (eq .Values.sidecar.listen "unix") -}}
{{- $port := include "select-service.port" . -}}
{{- $tls := .Values.tls.secretName -}}
{{- $scheme := include "select-service.scheme" . -}}
- name: select-service
  image: {{ include "select-service.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    {{- if $unix }}
    - --uds=/run/select-service/select.sock
    # only containers of this pod have the folder, and each may be somebody else
    - --uds-mode=0666
    {{- else if $sidecar }}
    - --host=localhost
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
    - --indexer-peers={{ $scheme }}://{{ include "select-service.fullname" . }}:8092
    {{- end }}
    {{- if $tls }}
    - --tls-cert=/etc/select-service-tls/tls.crt
    - --tls-key=/etc/select-service-tls/tls.key
    {{- with .Values.tls.ca }}
    - --peer-ca=/etc/select-service-tls/{{ . }}
    {{- end }}
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
          fieldPath: status.podIPs
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.envFrom }}
  envFrom:
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
  {{- include "select-service.probe" (list "startup" "/health" .) | nindent 2 }}
  {{- include "select-service.probe" (list "liveness" "/health" .) | nindent 2 }}
  # no workers needed: requests that find none are the demand that wakes a fleet at zero
  {{- include "select-service.probe" (list "readiness" "/ready?for=traffic" .) | nindent 2 }}
  resources:
    {{- toYaml (ternary .Values.sidecar.resources .Values.resources $sidecar) | nindent 4 }}
  securityContext:
    {{- include "select-service.containerSecurity" . | nindent 4 }}
  {{- if or $unix $tls .Values.extraVolumeMounts }}
  volumeMounts:
    {{- if $unix }}
    {{- include "select-service.parts.socketMount" . | nindent 4 }}
    {{- end }}
    {{- if $tls }}
    - name: select-service-tls
      mountPath: /etc/select-service-tls
      readOnly: true
    {{- end }}
    {{- with .Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
{{- end -}}

{{/* The pod's volumes, the key included; nothing where there are none. */}}
{{- define "select-service.parts.volumes" -}}
{{- with include "select-service.volumeItems" . -}}
volumes:
  {{- . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* The same as items, for a pod that has others. */}}
{{- define "select-service.volumeList" -}}{{ include "select-service.ours" (list "volumeItems" .) }}{{- end -}}
{{- define "select-service.parts.volumeItems" -}}{{ include "select-service.volumeItems" . }}{{- end -}}

{{- define "select-service.volumeItems" -}}
{{- $sidecar := eq .Values.mode "sidecar" -}}
{{- if and $sidecar (eq .Values.sidecar.listen "unix") }}
- name: select-service-socket
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
{{- end }}
{{- if .Values.tls.secretName }}
- name: select-service-tls
  secret:
    secretName: {{ .Values.tls.secretName }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
