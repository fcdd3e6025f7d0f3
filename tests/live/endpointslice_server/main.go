// An API server made of Kubernetes' own library that serves EndpointSlices, and nothing else.
//
// Debian has the library of a current version, and no kube-apiserver. Lists, watches, their cache and
// what they refuse are the library's; the strategy of EndpointSlices is not in it, so nothing is
// validated or defaulted here. Everybody may do everything.
// See tests/golden/kubernetes-apiserver/README.md.
package main

import (
	"context"
	"net"

	"github.com/spf13/pflag"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/endpoints/openapi"
	"k8s.io/apiserver/pkg/registry/generic"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/storage/names"
	"k8s.io/apiserver/pkg/util/compatibility"
	"k8s.io/kube-openapi/pkg/common"
)

var group = discovery.SchemeGroupVersion

func newScheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	must(discovery.AddToScheme(scheme))
	// The internal types are kube-apiserver's own; those of v1 take their place.
	internal := schema.GroupVersion{Group: group.Group, Version: runtime.APIVersionInternal}
	scheme.AddKnownTypes(internal, &discovery.EndpointSlice{}, &discovery.EndpointSliceList{})
	core := schema.GroupVersion{Version: "v1"}
	metav1.AddToGroupVersion(scheme, core)
	scheme.AddUnversionedTypes(core, &metav1.Status{}, &metav1.APIVersions{},
		&metav1.APIGroupList{}, &metav1.APIGroup{}, &metav1.APIResourceList{})
	return scheme
}

// strategy takes objects as they come.
type strategy struct {
	*runtime.Scheme
	names.NameGenerator
}

func (strategy) NamespaceScoped() bool                                            { return true }
func (strategy) AllowCreateOnUpdate() bool                                        { return false }
func (strategy) AllowUnconditionalUpdate() bool                                   { return true }
func (strategy) PrepareForCreate(context.Context, runtime.Object)                 {}
func (strategy) PrepareForUpdate(_ context.Context, _, _ runtime.Object)          {}
func (strategy) Canonicalize(runtime.Object)                                      {}
func (strategy) Validate(context.Context, runtime.Object) field.ErrorList         { return nil }
func (strategy) WarningsOnCreate(context.Context, runtime.Object) []string        { return nil }
func (strategy) WarningsOnUpdate(_ context.Context, _, _ runtime.Object) []string { return nil }
func (strategy) ValidateUpdate(_ context.Context, _, _ runtime.Object) field.ErrorList {
	return nil
}

func newStore(scheme *runtime.Scheme, stored generic.RESTOptionsGetter) rest.Storage {
	slices := discovery.Resource("endpointslices")
	strategy := strategy{scheme, names.SimpleNameGenerator}
	store := &genericregistry.Store{
		NewFunc:                   func() runtime.Object { return &discovery.EndpointSlice{} },
		NewListFunc:               func() runtime.Object { return &discovery.EndpointSliceList{} },
		DefaultQualifiedResource:  slices,
		SingularQualifiedResource: discovery.Resource("endpointslice"),
		CreateStrategy:            strategy,
		UpdateStrategy:            strategy,
		DeleteStrategy:            strategy,
		TableConvertor:            rest.NewDefaultTableConvertor(slices),
	}
	must(store.CompleteWithOptions(&generic.StoreOptions{RESTOptions: stored}))
	return store
}

func main() {
	scheme := newScheme()
	codecs := serializer.NewCodecFactory(scheme)
	flags := options.NewRecommendedOptions("/registry", codecs.LegacyCodec(group))
	flags.Authentication, flags.Authorization, flags.CoreAPI, flags.Admission = nil, nil, nil, nil
	flags.Features.EnablePriorityAndFairness = false // its rules are another group's objects
	flags.AddFlags(pflag.CommandLine)
	pflag.Parse()
	must(flags.SecureServing.MaybeDefaultWithSelfSignedCerts("localhost", nil, []net.IP{}))

	config := server.NewRecommendedConfig(codecs)
	config.EffectiveVersion = compatibility.DefaultBuildEffectiveVersion()
	// Without definitions there are no managedFields.
	none := func(common.ReferenceCallback) map[string]common.OpenAPIDefinition { return nil }
	config.OpenAPIV3Config = server.DefaultOpenAPIV3Config(none, openapi.NewDefinitionNamer(scheme))
	config.OpenAPIV3Config.IgnorePrefixes = []string{"/apis"}
	config.SkipOpenAPIInstallation = true
	must(flags.ApplyTo(config))
	config.Authorization.Authorizer = authorizerfactory.NewAlwaysAllowAuthorizer()
	made, err := config.Complete().New("endpointslices", server.NewEmptyDelegate())
	must(err)
	info := server.NewDefaultAPIGroupInfo(group.Group, scheme, metav1.ParameterCodec, codecs)
	store := newStore(scheme, config.RESTOptionsGetter)
	info.VersionedResourcesStorageMap[group.Version] = map[string]rest.Storage{"endpointslices": store}
	must(made.InstallAPIGroup(&info))
	must(made.PrepareRun().RunWithContext(server.SetupSignalContext()))
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
