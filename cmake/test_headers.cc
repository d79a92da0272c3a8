// Has the precompiled headers of the tests (quire_test_headers in QuireTargets.cmake); nothing links it.
int main() {}
