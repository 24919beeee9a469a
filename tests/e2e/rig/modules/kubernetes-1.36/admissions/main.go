// Admissions through the kubelet's own device manager, without the rest of a kubelet.
//
// Usage: admissions FOLDER RESOURCE SHARES COUNT. The manager serves kubelet.sock in FOLDER, waits
// for a plugin of RESOURCE, and admits COUNT pods of SHARES each, one after the other, each of which
// ends before the next. It prints the nanoseconds of each admission, a line each.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
	_ "unsafe" // for go:linkname

	cadvisorapi "github.com/google/cadvisor/info/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// The manager's exported constructor takes no folder but /var/lib/kubelet/device-plugins.
//
//go:linkname newManager k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManager(klog.Logger, string, []cadvisorapi.Node, topologymanager.Store) (*devicemanager.ManagerImpl, error)

type ready struct{}

func (ready) AddSource(string) {}
func (ready) AllReady() bool   { return true }

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	klog.SetOutput(os.Stderr)
	klog.LogToStderr(false)
	folder, name := os.Args[1], v1.ResourceName(os.Args[2])
	count, err := strconv.Atoi(os.Args[4])
	check(err)
	limits := v1.ResourceList{name: resource.MustParse(os.Args[3])}

	var active []*v1.Pod
	manager, err := newManager(klog.Background(), filepath.Join(folder, "kubelet.sock"), nil, topologymanager.NewFakeManager())
	check(err)
	check(manager.Start(klog.Background(), func() []*v1.Pod { return active }, ready{}, containermap.NewContainerMap(), sets.New[string]()))

	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		_, allocatable, _ := manager.GetCapacity()
		if shares := allocatable[name]; shares.Value() > 0 {
			break
		}
		if time.Since(began) > 30*time.Second {
			check(fmt.Errorf("no plugin of %s in %s", name, folder))
		}
	}
	for number := range count {
		id := fmt.Sprintf("pod-%d", number)
		pod := &v1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: id, Namespace: "bench", UID: types.UID(id)},
			Spec: v1.PodSpec{Containers: []v1.Container{
				{Name: "main", Resources: v1.ResourceRequirements{Limits: limits, Requests: limits}},
			}},
		}
		active = []*v1.Pod{pod}
		began := time.Now()
		check(manager.Allocate(pod, &pod.Spec.Containers[0]))
		fmt.Println(time.Since(began).Nanoseconds())
		active = nil
	}
}
