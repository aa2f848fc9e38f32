// As much of a kubelet as an agent on a machine without one needs: it says that no pod has a device, takes registrations,
// and prints of each what is offered, and which devices were on vfio-pci at that moment.
package main

import (
	"context"
	"log"
	"net"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	plugins "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	resources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const podResources = "/var/lib/kubelet/pod-resources/kubelet.sock"

type kubelet struct {
	resources.UnimplementedPodResourcesListerServer
	plugins.UnimplementedRegistrationServer
}

func (kubelet) List(context.Context, *resources.ListPodResourcesRequest) (*resources.ListPodResourcesResponse, error) {
	return &resources.ListPodResourcesResponse{}, nil
}

func (kubelet) Register(_ context.Context, request *plugins.RegisterRequest) (*plugins.Empty, error) {
	bound, err := filepath.Glob("/sys/bus/pci/drivers/vfio-pci/0*")
	if err != nil {
		return nil, err
	}
	for i := range bound {
		bound[i] = filepath.Base(bound[i])
	}
	log.Printf("registered %s; on vfio-pci: %s", request.ResourceName, strings.Join(bound, " "))
	go follow(request)
	return &plugins.Empty{}, nil
}

func follow(request *plugins.RegisterRequest) {
	socket := filepath.Join(plugins.DevicePluginPath, request.Endpoint)
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Print(err)
		return
	}
	defer connection.Close()
	stream, err := plugins.NewDevicePluginClient(connection).ListAndWatch(context.Background(), &plugins.Empty{})
	for err == nil {
		var list *plugins.ListAndWatchResponse
		if list, err = stream.Recv(); err != nil {
			break
		}
		ids := []string{}
		for _, device := range list.Devices {
			ids = append(ids, device.ID+"="+device.Health)
		}
		log.Printf("offered %s: %s", request.ResourceName, strings.Join(ids, " "))
	}
	log.Printf("%s ended: %v", request.ResourceName, err)
}

func serve(socket string, register func(*grpc.Server)) error {
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		return err
	}
	if err := os.RemoveAll(socket); err != nil {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	register(server)
	return server.Serve(listener)
}

func main() {
	log.SetFlags(0)
	failed := make(chan error, 2)
	go func() {
		failed <- serve(podResources, func(s *grpc.Server) { resources.RegisterPodResourcesListerServer(s, kubelet{}) })
	}()
	go func() {
		failed <- serve(plugins.KubeletSocket, func(s *grpc.Server) { plugins.RegisterRegistrationServer(s, kubelet{}) })
	}()
	log.Fatal(<-failed)
}
